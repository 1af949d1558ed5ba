// Plotly's widget, made once plotly is there. A page that shows a new figure has got plotly with it, in PLOTLY; one
// that is loaded again asks the kernel for it, once: all widgets of a kernel come back in one answer that the page
// waits 4 s for, and plotly's 5 MB are not to be part of it.

function fromText(text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  return import(address).finally(() => URL.revokeObjectURL(address));
}

function fromKernel(model) {
  return new Promise((resolve) => {
    function take(content, buffers) {
      if (content.kind !== "plotly") return;
      model.off("msg:custom", take);
      resolve(fromText(buffers[0]));
    }
    model.on("msg:custom", take);
    model.send({ kind: "plotly" });
  });
}

async function made(model) {
  // two figures may both ask: only what has come is kept, since a kernel may end before it answers; by version, since
  // the next kernel of a page may have another plotly
  const known = (globalThis.memlabPlotly ??= {});
  known[VERSION] ??= await (PLOTLY ? fromText(PLOTLY) : fromKernel(model));
  const figure = known[VERSION].default();
  await figure.initialize({ model });
  return figure;
}

export default () => {
  let figure;
  return {
    // returns at once: until it has, the model gets no message, and after 2 s it never gets one
    initialize({ model }) {
      figure = made(model);
    },
    render: async (context) => (await figure).render(context),
  };
};
