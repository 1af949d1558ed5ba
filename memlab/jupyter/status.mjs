// What widgets of the kernel cannot do by themselves: speak to screen readers, copy, have keys of their own, keep
// figures as wide as their place, and notice that the kernel is gone.

const QUIET_MILLISECONDS = 4000;
const NOTE_MILLISECONDS = 6000;
// a front end that is slow to make its subshell sends its first message elsewhere (comms.py)
const SECOND_HELLO_MILLISECONDS = 1000;
const FIGURES = "Live figures. Their numbers are in the table below.";

function part(parent, tag, className, attributes = {}) {
  const element = document.createElement(tag);
  element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

function put(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// plotly fits a figure to its place when the window changes, and the place changes without it: with the side bar,
// and when a figure that was drawn before it stood on the page gets there
function fitting() {
  const seen = new WeakSet();
  const observer = new ResizeObserver((entries) => {
    const fits = ({ target, contentRect }) =>
      !contentRect.width || Math.abs(contentRect.width - (target._fullLayout?.width ?? 0)) < 2;
    if (!entries.every(fits)) requestAnimationFrame(() => window.dispatchEvent(new Event("resize")));
  });
  return {
    watch(figure) {
      if (seen.has(figure)) return;
      seen.add(figure);
      observer.observe(figure);
    },
    end: () => observer.disconnect(),
  };
}

// a notebook takes arrows, Enter and letters for itself, even where a drop-down has the focus: d d deletes the cell.
// Its shortcuts that are no plain keys stay.
function ownKeys({ target, ctrlKey, metaKey, altKey }) {
  if (target instanceof Element && target.closest(".memlab-panel")) {
    target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
  }
}

function render({ model, el }) {
  el.classList.add("memlab-status");
  const stale = part(el, "div", "memlab-stale", { role: "alert" });
  const line = part(el, "div", "memlab-line");
  const world = part(el, "div", "memlab-world");
  const note = part(el, "div", "memlab-note", { role: "status" });
  const errors = part(el, "div", "memlab-errors", { role: "alert" });
  const spoken = part(el, "div", "memlab-spoken", { role: "status", "aria-live": "polite" });
  const fitted = fitting();
  let lastSpoken = 0;
  const timers = {};

  function later(name, milliseconds, act) {
    timers[name] ??= setTimeout(() => { delete timers[name]; act(); }, milliseconds);
  }

  // updates that come while plotly is still drawing for the first time are lost: the kernel is told when it has
  let isDrawn = false;
  function drawn() {
    const plot = panel()?.querySelector(".js-plotly-plot");
    if (isDrawn || !plot?._fullLayout || !plot.data) return;
    isDrawn = true;
    model.send({ kind: "drawn" });
  }

  const panel = () => el.closest(".memlab-panel");

  // a reader that is interrupted four times a second says nothing at all
  function speak() {
    const rest = lastSpoken + QUIET_MILLISECONDS - Date.now();
    if (rest > 0) {
      later("speak", rest, speak);
      return;
    }
    lastSpoken = Date.now();
    spoken.textContent = model.get("said");
  }

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
    element.hidden = !text;
  }

  // ipywidgets give a drop-down without a description, and every slider, no name
  function label() {
    const here = panel();
    if (!here) return;
    for (const [className, name] of Object.entries(model.get("names"))) {
      for (const field of here.querySelectorAll(`.${className} :is(select, input)`)) put(field, "aria-label", name);
    }
    for (const handle of here.querySelectorAll(".widget-slider [role=slider]")) {
      const row = handle.closest(".widget-slider");
      put(handle, "aria-label", row.querySelector(".widget-label")?.textContent ?? "");
      put(handle, "aria-valuetext", row.querySelector(".widget-readout")?.textContent ?? "");
    }
    for (const figure of here.querySelectorAll(".js-plotly-plot")) {
      put(figure, "role", "img");
      put(figure, "aria-label", FIGURES);
      fitted.watch(figure);
    }
  }

  function tell(text) {
    write(note, text);
    later("note", NOTE_MILLISECONDS, () => write(note, ""));
  }

  function copy() {
    const text = model.get("copied");
    if (!text) return;
    // no clipboard at all where the page came by plain http from another machine
    const writing = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
    writing.then(
      () => { tell("copied to the clipboard"); model.send({ kind: "copied" }); },
      () => model.send({ kind: "not copied" }),
    );
  }

  function gone() {
    const here = panel();
    here?.classList.add("memlab-gone");
    // neither the mouse nor the keyboard gets there any more
    for (const controls of here?.querySelectorAll(".memlab-controls") ?? []) controls.inert = true;
    write(world, "");
    here?.prepend(stale);
    write(stale, model.get("farewell"));
  }

  const watched = {
    "change:line": () => write(line, model.get("line")),
    "change:world": () => write(world, model.get("world")),
    "change:errors": () => write(errors, model.get("errors")),
    "change:said": speak,
    "change:copied": copy,
    comm_live_update: gone,
  };
  for (const [event, react] of Object.entries(watched)) model.on(event, react);
  for (const event of ["change:line", "change:world", "change:errors"]) watched[event]();
  write(stale, "");
  write(note, "");
  // fields are drawn after this, in their own time
  const ticking = setInterval(() => { label(); drawn(); }, 1000);
  label();
  // before the document, which is where the notebook listens
  window.addEventListener("keydown", ownKeys, true);
  model.send({ kind: "hello" });
  later("hello", SECOND_HELLO_MILLISECONDS, () => model.send({ kind: "hello" }));
  return () => {
    clearInterval(ticking);
    window.removeEventListener("keydown", ownKeys, true);
    Object.values(timers).forEach(clearTimeout);
    fitted.end();
    stale.remove();
    for (const [event, react] of Object.entries(watched)) model.off(event, react);
  };
}

export default { render };
