// Stands for the kernel in a page without one: a model as anywidget gives it to a panel, whose answers were written down
// when the page was made (demo.py). What `RunReplay` does is not done anew here: a place is looked up, and drawn.
// The panel's own code stands before this text.

{
  const IS_RECORDING = "this is a recording:";

  // the value that a patch makes (patches.py); what does not differ is shared
  function patched(value, patch) {
    if (!patch) return value;
    const [kind, what, more, items] = patch;
    if (kind === 0) return what;
    if (kind === 2) return value.toSpliced(what, more, ...items);
    const made = Array.isArray(value) ? [...value] : { ...value };
    for (const [name, each] of Object.entries(what)) made[name] = patched(value[name], each);
    for (const name of more ?? []) delete made[name];
    return made;
  }

  class Recording {
    #known;
    #frames = [];
    #listeners = new Map();
    #place = { stretch: null, frame: null, isPlaying: false }; // no stretch: the end of the recording
    #refused = null;
    #error = "";
    #code = "";
    #target;
    #choices = {};
    #heard = {};
    #tick = 0;
    #clock = null;
    #state;

    constructor(known) {
      this.#known = known;
      this.#target = known.first.controls.target;
      known.frames.reduce((state, patch) => this.#frames[this.#frames.push(patched(state, patch)) - 1], known.first);
      this.#show();
    }

    // -- as a model of anywidget -----------------------------------------------------------------

    get(name) {
      return name === "fixed" ? this.#known.fixed : this.#state[name];
    }

    on(event, react) {
      this.#listeners.set(event, [...(this.#listeners.get(event) ?? []), react]);
    }

    off(event, react) {
      this.#listeners.set(event, (this.#listeners.get(event) ?? []).filter((each) => each !== react));
    }

    send(message) {
      if (message.kind !== "hello") this.#error = "";
      this.#do(message);
      this.#heard[message.view] = message.number;
      this.#show();
    }

    #tell(event, ...content) {
      for (const react of this.#listeners.get(event) ?? []) react(...content);
    }

    // -- what is asked ---------------------------------------------------------------------------

    #do({ kind, field, on, text, button }) {
      const row = this.#state.controls.settings[this.#known.fixed.settings.findIndex(({ name }) => name === field)];
      if (kind === "flip") this.#ask(`${field}=${on ? row.choice : this.#known.off[field]}`);
      else if (kind === "choose" && row.on) this.#ask(`${field}=${text}`);
      else if (kind === "choose") this.#choices[field] = text;
      else if (kind === "budget") this.#error = `${IS_RECORDING} its budget stays where it was`;
      else if (kind === "target") this.#target = text;
      else if (kind === "not copied") this.#error = "the browser did not let the code be copied: it stands below";
      else if (kind === "press") this.#press(button);
      else if (kind !== "hello") this.#error = `${IS_RECORDING} what was asked for needs a run`;
    }

    #press(button) {
      const { stretch, frame, isPlaying } = this.#place;
      if (button === "run") {
        this.#refused = null;
        this.#play(0);
      } else if (button === "pause" && isPlaying) this.#stand({ stretch, frame });
      else if (button === "pause" && stretch !== null) this.#play(frame ?? this.#known.stretches[stretch].last);
      else if (button === "cancel") this.#stand({ stretch: null, frame: null });
      else if (button === "find") this.#ask("find");
      else if (button === "copy") this.#copy();
    }

    #ask(key) {
      const { stretch, isPlaying } = this.#place;
      const { stretches, end } = this.#known;
      const answers = stretch === null ? end : stretches[stretch][isPlaying ? "playing" : "standing"];
      const answer = answers[key];
      if (answer === undefined) {
        this.#error = `${IS_RECORDING} ${key.replace("=", " ")} was not written down`;
        return;
      }
      this.#refused = answer?.rows ? answer : null;
      if (answer === "end") this.#stand({ stretch: null, frame: null });
      else if (Number.isInteger(answer) && isPlaying) this.#play(stretches[answer].first);
      else if (Number.isInteger(answer)) this.#stand({ stretch: answer, frame: null });
    }

    #copy() {
      const { plans, code } = this.#known;
      const [text, error] = code[plans[this.#place.stretch ?? plans.length - 1]][this.#target];
      this.#error = error;
      if (error) return;
      this.#code = text;
      this.#tell("msg:custom", { kind: "copy", text });
    }

    // -- where it stands -------------------------------------------------------------------------

    #play(frame) {
      this.#stand({ stretch: null, frame: null });
      this.#at(frame);
      this.#tick = this.#known.ticks[frame];
      this.#clock = setInterval(() => this.#advance(), this.#known.tick);
    }

    #advance() {
      const { ticks } = this.#known;
      this.#tick += 1;
      if (this.#tick >= ticks.at(-1)) this.#stand({ stretch: null, frame: null });
      else this.#at(ticks.findLastIndex((tick) => tick <= this.#tick));
      this.#show();
    }

    #at(frame) {
      const stretch = this.#known.stretches.findLastIndex(({ first }) => first <= frame);
      this.#place = { stretch, frame, isPlaying: true };
    }

    #stand(place) {
      clearInterval(this.#clock);
      this.#place = { ...place, isPlaying: false };
    }

    // -- what is shown ---------------------------------------------------------------------------

    #placed() {
      const { stretch, frame, isPlaying } = this.#place;
      const { first, pauses, stands } = this.#known;
      if (stretch === null) return first;
      if (frame === null) return patched(first, stands[stretch]);
      const state = this.#frames[frame];
      return isPlaying ? state : { ...state, controls: patched(state.controls, pauses[frame]) };
    }

    #show() {
      const before = this.#state;
      const state = this.#placed();
      const { rows = {}, line = "", said } = this.#refused ?? {};
      const settings = state.controls.settings.map((row, number) => {
        const { name } = this.#known.fixed.settings[number];
        if (row.on) this.#choices[name] = row.choice;
        const choice = (this.#choices[name] ??= row.choice);
        const [effect, why] = row.effects[choice] ?? ["", ""];
        return { ...row, choice, effect, why, said: rows[number] ?? row.said };
      });
      const words = { line: state.controls.line + line, said: said ?? state.controls.said, errors: this.#error };
      const own = { settings, heard: { ...this.#heard }, target: this.#target, code: this.#code };
      this.#state = { ...state, controls: { ...state.controls, ...words, ...own } };
      this.#tell("change:controls");
      for (const part of ["figure", "table"]) {
        if (before?.[part] !== state[part]) this.#tell(`change:${part}`);
      }
    }
  }

  const known = JSON.parse(document.getElementById("known").textContent);
  render({ model: new Recording(known), el: document.getElementById("panel") });
}
