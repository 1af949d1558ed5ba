// The live figure, drawn from the model's state alone, so that no update can be lost: a page that is slow to begin, or is
// loaded again, draws what the figure has become meanwhile.
// The part of plotly that it needs stands before this text, as `Plotly` (plotly/package.json).

// no bar of tools, which would stand on the legend: dragging zooms, a double click undoes it
const CONFIG = { displayModeBar: false };

// coordinates come as bytes
function unpacked(trace) {
  const made = { ...trace };
  for (const name of ["x", "y"]) {
    const bytes = made[name];
    if (bytes instanceof DataView) {
      made[name] = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
    }
  }
  return made;
}

// Draws the model's figure in a place, now and whenever it changes; returns what ends that.
function drawFigure(model, place) {
  let isAsked = false;
  function draw() {
    isAsked = false;
    const { traces, layout } = model.get("figure");
    return Plotly.react(place, traces.map(unpacked), structuredClone(layout), CONFIG);
  }
  // of several updates between two frames of the page the last one is drawn
  function ask() {
    if (!isAsked) requestAnimationFrame(draw);
    isAsked = true;
  }
  model.on("change:figure", ask);
  // the place changes with the side bar, with the window, and when a figure that was drawn before gets onto the page
  const observer = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width && place._fullLayout && Math.abs(width - place._fullLayout.width) >= 2) Plotly.Plots.resize(place);
  });
  draw().then(() => observer.observe(place));
  return () => {
    observer.disconnect();
    model.off("change:figure", ask);
    Plotly.purge(place);
  };
}
