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

// A place narrower than this has the pictures below each other, and a slim one half the room for a line of words.
const NARROW_PIXELS = 520, SLIM_PIXELS = 420;
const PICTURE_PIXELS = 230, GAP_PIXELS = 100, ABOVE_PICTURES_PIXELS = 38, LINE_PIXELS = 14, SLIM_LEGEND_PIXELS = 7 * 19;
// In a picture narrower than this, words do not stand beside each other.
const CROWDED_PIXELS = 250;

// What to draw, for the width that there is; `layout` is for two pictures beside each other (live_figure.py).
function fitted({ traces, layout }, width) {
  layout = structuredClone(layout);
  const isNarrow = width < NARROW_PIXELS;
  const [from, to] = isNarrow ? [0, 1] : layout.xaxis.domain;
  const picture = (width - layout.margin.l - layout.margin.r) * (to - from);
  if (isNarrow) inOneColumn(layout, picture, width < SLIM_PIXELS);
  if (picture < CROWDED_PIXELS) {
    for (const word of named("change", layout)) word.text = word.text.split(" ")[0]; // its number
  }
  return [traces, layout];
}

function inOneColumn(layout, picture, isSlim) {
  const { margin, legend } = layout;
  const line = isSlim ? LINE_PIXELS : 0;
  if (isSlim) margin.t = SLIM_LEGEND_PIXELS + ABOVE_PICTURES_PIXELS + line;
  const all = 4 * PICTURE_PIXELS + 3 * (GAP_PIXELS + line);
  layout.height = all + margin.t + margin.b;
  legend.y = 1 - (margin.t - ABOVE_PICTURES_PIXELS - line) / layout.height;
  ["", "2", "3", "4"].forEach((number, place) => {
    const top = 1 - (place * (PICTURE_PIXELS + GAP_PIXELS + line)) / all;
    layout[`xaxis${number}`].domain = [0, 1];
    layout[`yaxis${number}`].domain = [top - PICTURE_PIXELS / all, top];
  });
  for (const word of named("title", layout)) word.yshift += line;
  if (isSlim) for (const word of named("key", layout)) word.text = inTwoLines(word.text, picture / 6);
}

function named(name, layout) {
  return layout.annotations.filter(word => word.name === name);
}

function inTwoLines(text, most) {
  const parts = text.split(/(?<=&nbsp; |; )/);
  let length = 0;
  const rest = parts.findIndex(part => (length += part.replace(/<[^>]*>|&nbsp;/g, "").length) > most);
  return rest > 0 ? `${parts.slice(0, rest).join("")}<br>${parts.slice(rest).join("")}` : text;
}

// Draws the model's figure in a place, now and whenever it changes; returns what ends that.
function drawFigure(model, place) {
  let isAsked = false;
  function draw() {
    isAsked = false;
    const [traces, layout] = fitted(model.get("figure"), place.clientWidth);
    return Plotly.react(place, traces.map(unpacked), layout, CONFIG);
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
    if (width && place._fullLayout && Math.abs(width - place._fullLayout.width) >= 2) Plotly.Plots.resize(place).then(ask);
  });
  draw().then(() => observer.observe(place));
  return () => {
    observer.disconnect();
    model.off("change:figure", ask);
    Plotly.purge(place);
  };
}
