// A panel in the page: controls and words drawn from the model's state, and messages for what people do with them
// (panel_page.py says what travels). `drawFigure` stands before this text (figure.mjs).

const FIGURE = "Live figures. Their numbers are in the table below.";
const QUIET_MILLISECONDS = 4000;
const NOTE_MILLISECONDS = 6000;
// a front end that is slow to make its subshell sends its first message elsewhere (comms.py)
const SECOND_HELLO_MILLISECONDS = 1000;

function part(parent, tag, className = "", attributes = {}) {
  const element = document.createElement(tag);
  element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

function write(element, text, title = "") {
  if (element.textContent !== text) element.textContent = text;
  if (element.title !== title) element.title = title;
  element.hidden = !text;
}

// a list that is open closes when it is filled again
function fill(select, choices) {
  const key = JSON.stringify(choices);
  if (select.dataset.choices === key) return;
  select.dataset.choices = key;
  select.replaceChildren(...choices.map(([text, value]) => new Option(text, value)));
}

// a notebook takes arrows, Enter and letters for itself, even where a drop-down has the focus: d d deletes the cell.
// Its shortcuts that are no plain keys stay.
function ownKeys({ target, ctrlKey, metaKey, altKey }) {
  if (target instanceof Element && target.closest(".memlab-panel")) {
    target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
  }
}

// What a view asks, and which of its controls wait for an answer: they stay as the user has put them until then.
class Asking {
  #model;
  #view = crypto.randomUUID?.() ?? String(Math.random());
  #number = 0;
  #waiting = new Map();

  constructor(model) {
    this.#model = model;
  }

  send(content, control = null) {
    this.#number += 1;
    if (control) this.#waiting.set(control, this.#number);
    this.#model.send({ ...content, view: this.#view, number: this.#number });
  }

  isWaiting(control) {
    return (this.#waiting.get(control) ?? 0) > (this.#model.get("controls").heard?.[this.#view] ?? 0);
  }
}

function settingRow(parent, { name, title, help }, asking) {
  const row = part(parent, "div", "memlab-setting");
  const head = part(row, "div", "memlab-choice");
  const label = part(head, "label", "", { title: help });
  const box = part(label, "input", "", { type: "checkbox" });
  part(label, "span").textContent = title;
  const choice = part(head, "select", "", { "aria-label": `${title}, which`, title: `${title}: ${help}` });
  const words = part(row, "div", "memlab-words");
  const effect = part(words, "span", "memlab-effect");
  const said = part(words, "span");
  box.addEventListener("change", () => asking.send({ kind: "flip", field: name, on: box.checked }, box));
  choice.addEventListener("change", () => asking.send({ kind: "choose", field: name, text: choice.value }, choice));
  return (state, isOver) => {
    fill(choice, state.choices);
    choice.style.visibility = state.choices.length > 1 ? "visible" : "hidden";
    if (!asking.isWaiting(box)) box.checked = state.on;
    if (!asking.isWaiting(choice)) choice.value = state.choice;
    box.disabled = choice.disabled = isOver;
    write(effect, state.effect, state.why);
    write(said, state.said);
  };
}

function budgetRow(parent, { steps, help }, asking) {
  const row = part(parent, "div", "memlab-budget");
  const label = part(row, "label", "", { title: help });
  part(label, "span").textContent = "Budget";
  const slider = part(label, "input", "", { type: "range", min: 1, max: steps, step: 1 });
  const said = part(row, "span", "memlab-effect");
  let isDragged = false;
  slider.addEventListener("input", () => { isDragged = true; });
  slider.addEventListener("change", () => {
    isDragged = false;
    asking.send({ kind: "budget", position: slider.valueAsNumber }, slider);
  });
  return (state, isOver) => {
    slider.disabled = isOver || !state.known;
    if (!isDragged && !asking.isWaiting(slider)) slider.valueAsNumber = state.position;
    slider.setAttribute("aria-valuetext", state.text);
    write(said, state.text);
  };
}

function buttonRows(parent, { buttons, targets, steps: { most, help: stepsHelp } }, asking) {
  const made = {};
  const rows = buttons.map((row) => {
    const place = part(parent, "div", "memlab-buttons");
    for (const [name, { text, help }] of Object.entries(row)) {
      made[name] = part(place, "button", "", { type: "button", "data-help": help });
      made[name].textContent = text;
      made[name].addEventListener("click", () => asking.send({ kind: "press", button: name }));
    }
    return place;
  });
  const stepsLabel = part(rows[0], "label", "", { title: stepsHelp });
  const steps = part(stepsLabel, "input", "", { type: "number", min: 1, max: most, step: 1, placeholder: "∞" });
  part(stepsLabel, "span").textContent = "steps";
  rows[0].insertBefore(stepsLabel, made.run.nextSibling);
  steps.addEventListener("change", () => asking.send({ kind: "steps", count: Math.max(0, Math.floor(steps.valueAsNumber || 0)) }, steps));
  const label = part(rows[0], "label", "", { title: "off: weights, moments and random state are put back when the run ends" });
  const keep = part(label, "input", "", { type: "checkbox" });
  part(label, "span").textContent = "keep what it trains";
  keep.addEventListener("change", () => asking.send({ kind: "keep", on: keep.checked }, keep));
  const together = part(rows.at(-1), "span", "memlab-together");
  together.append(made.copy);
  const target = part(together, "select", "", { "aria-label": "Copy as code, for what" });
  fill(target, targets.map((name) => [name, name]));
  target.addEventListener("change", () => asking.send({ kind: "target", text: target.value }, target));
  return ({ off, pause, keep: isKept, steps: count, target: chosen }) => {
    for (const [name, button] of Object.entries(made)) {
      button.disabled = name in off;
      button.title = off[name] || button.dataset.help;
    }
    keep.disabled = "keep" in off;
    steps.disabled = "steps" in off;
    stepsLabel.title = off.steps || stepsHelp;
    if (!asking.isWaiting(steps) && steps !== document.activeElement) steps.value = count;
    made.pause.textContent = pause;
    if (!asking.isWaiting(keep)) keep.checked = isKept;
    if (!asking.isWaiting(target)) target.value = chosen;
  };
}

// One line that changes all the time, and what a screen reader is told of it: one that is interrupted four times a second
// says nothing at all.
function statusLines(parent) {
  const place = part(parent, "div", "memlab-status");
  const line = part(place, "div", "memlab-line");
  const world = part(place, "div", "memlab-world");
  const note = part(place, "div", "memlab-note", { role: "status" });
  const errors = part(place, "div", "memlab-errors", { role: "alert" });
  const spoken = part(place, "div", "memlab-spoken", { role: "status", "aria-live": "polite" });
  let [lastSpoken, waiting, toSay] = [0, null, ""];
  let noteTimer = null;
  write(note, "");

  function speak() {
    waiting = null;
    lastSpoken = Date.now();
    spoken.textContent = toSay;
  }

  return {
    draw(state) {
      write(line, state.line);
      write(world, state.world);
      write(errors, state.errors);
      if (state.said === toSay) return;
      toSay = state.said;
      waiting ??= setTimeout(speak, Math.max(0, lastSpoken + QUIET_MILLISECONDS - Date.now()));
    },
    tell(text) {
      write(note, text);
      clearTimeout(noteTimer);
      noteTimer = setTimeout(() => write(note, ""), NOTE_MILLISECONDS);
    },
    end() {
      clearTimeout(waiting);
      clearTimeout(noteTimer);
    },
  };
}

function render({ model, el }) {
  const fixed = model.get("fixed");
  const asking = new Asking(model);
  el.classList.add("memlab-panel");
  const stale = part(el, "div", "memlab-stale", { role: "alert" });
  write(stale, "");
  const title = part(el, "b");
  const sides = part(el, "div", "memlab-sides");
  const controls = part(sides, "div", "memlab-controls");
  const settings = part(controls, "div", "memlab-settings");
  const rows = fixed.settings.map((setting) => settingRow(settings, setting, asking));
  const budget = budgetRow(controls, fixed.budget, asking);
  const buttons = buttonRows(controls, fixed, asking);
  const status = statusLines(controls);
  const code = part(controls, "textarea", "memlab-code", { "aria-label": "Code", readonly: "", spellcheck: "false" });
  const figure = part(sides, "div", "memlab-figure", { role: "img", "aria-label": FIGURE });
  const table = part(el, "div", "memlab-table");

  function draw() {
    const state = model.get("controls");
    write(title, state.title);
    rows.forEach((row, place) => row(state.settings[place], state.over));
    budget(state.budget, state.over);
    buttons(state);
    status.draw(state);
    if (code.value !== state.code) code.value = state.code;
    code.hidden = !state.code;
  }

  function drawTable() {
    table.innerHTML = model.get("table"); // written by memlab, names and messages in it escaped
  }

  function heard({ kind, text }) {
    if (kind !== "copy") return;
    // no clipboard at all where the page came by plain http from another machine
    const writing = navigator.clipboard?.writeText(text) ?? Promise.reject(new Error("no clipboard"));
    writing.then(() => status.tell("copied to the clipboard"), () => asking.send({ kind: "not copied" }));
  }

  // what a page without the kernel shows in the panel's place
  const hidesStill = part(document.head, "style");
  hidesStill.textContent = `.memlab-still-${fixed.still} { display: none; }`;

  function gone() {
    hidesStill.remove();
    el.classList.add("memlab-gone");
    // neither the mouse nor the keyboard gets there any more
    controls.inert = true;
    for (const each of controls.querySelectorAll(".memlab-world")) each.hidden = true;
    write(stale, fixed.farewell);
  }

  const watched = { "change:controls": draw, "change:table": drawTable, "msg:custom": heard, comm_live_update: gone };
  for (const [event, react] of Object.entries(watched)) model.on(event, react);
  draw();
  drawTable();
  const endFigure = drawFigure(model, figure);
  // before the document, which is where the notebook listens
  window.addEventListener("keydown", ownKeys, true);
  asking.send({ kind: "hello" });
  const secondHello = setTimeout(() => asking.send({ kind: "hello" }), SECOND_HELLO_MILLISECONDS);
  return () => {
    clearTimeout(secondHello);
    hidesStill.remove();
    window.removeEventListener("keydown", ownKeys, true);
    for (const [event, react] of Object.entries(watched)) model.off(event, react);
    status.end();
    endFigure();
  };
}

export default { render };
