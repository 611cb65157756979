// The numbers of a token under the pointer or the arrow keys, and what becomes of tokens when a bound moves.
{
  const data = JSON.parse(document.getElementById("tokens").textContent);
  const told = document.querySelector(".told");
  const sections = [...document.querySelectorAll(".sequence")].map((section, index) => ({
    section, index, box: section.querySelector(".tokens"), tokens: [...section.querySelectorAll(".tokens i")], state: section.querySelector(".state"),
  }));
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const part = (name) => document.querySelector(`[data-part="${name}"]`);
  const [choice, slider] = [part("bound"), part("slider")];
  const short = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());
  let here = null;

  const tell = (found, at) => {
    here?.token.classList.remove("here");
    const [token, numbers] = [found.tokens[at], data.sequences[found.index]];
    if (!token) return;
    here = { found, at, token };
    token.classList.add("here");
    const [rollout, train] = [numbers.rollout[at], numbers.train[at]];
    const lines = [
      ["token", token.textContent.trim() + (numbers.ids ? " (id " + numbers.ids[at] + ")" : "")],
      ["position", numbers.position[at]],
      ["log ratio", rollout === null || train === null ? "–" : short(train - rollout) + " nats"],
      ["probability, rollout", short(rollout === null ? null : Math.exp(rollout))],
      ["probability, train", short(train === null ? null : Math.exp(train))],
    ];
    const bound = data.bounds[choice.value];
    if (bound) {
      const own = bound.sequences[found.index];
      lines.push(["weight as set, before normalization", short(own.weights[at])]);
      if (bound.sentences[own.why[at]]) lines.push(["rejected as set by", bound.sentences[own.why[at]]]);
    }
    if (numbers.experts) lines.push(["experts that differ", numbers.experts[at]]);
    const list = document.createElement("dl");
    for (const [name, value] of lines) list.append(make("dt", name), make("dd", value));
    told.replaceChildren(list);
    told.hidden = false;
  };

  const move = () => {
    const [bound, point] = [data.bounds[choice.value], Number(slider.value)];
    part("value").textContent = bound.values[point] + (point === bound.start ? " (as set)" : "");
    slider.setAttribute("aria-valuetext", bound.values[point]);
    let [gone, all, lost] = [0, 0, 0];
    for (const { section, index, tokens, state } of sections) {
      const own = bound.sequences[index];
      tokens.forEach((token, at) => {
        const becomes = bound.patterns[own.states[at]]?.[point];
        token.classList.toggle("gone", becomes === "1");
        token.classList.toggle("bound", becomes === "2");
      });
      const [kept, total] = [own.kept[point], data.sequences[index].total];
      const whole = total > 0 && kept === 0;
      section.classList.toggle("lost", whole);
      state.textContent = total - kept ? (total - kept).toLocaleString("en") + " rejected" : "";
      gone += total - kept;
      all += total;
      lost += whole;
    }
    part("here").textContent = `Of the sequences shown: ${gone.toLocaleString("en")} of ${all.toLocaleString("en")} tokens rejected, ${lost} of ${sections.length} sequences whole.`;
    part("totals").replaceChildren(...Object.entries(bound.totals).map(([run, points]) => {
      const row = document.createElement("tr");
      const name = make("th", run);
      name.scope = "row";
      row.append(name, ...points[point].map((text) => make("td", text)));
      return row;
    }));
  };

  const begin = () => {
    const bound = data.bounds[choice.value];
    Object.assign(slider, { min: 0, max: bound.values.length - 1, value: bound.start });
    move();
  };

  if (data.bounds.length) {
    choice.replaceChildren(...data.bounds.map((bound, index) => Object.assign(make("option", bound.name), { value: index })));
    choice.addEventListener("change", begin);
    slider.addEventListener("input", move);
    document.querySelector(".mover").hidden = false;
    begin();
  }
  for (const found of sections) {
    const at = (event) => found.tokens.indexOf(event.target.closest("i"));
    for (const kind of ["pointerover", "click"]) found.box.addEventListener(kind, (event) => at(event) >= 0 && tell(found, at(event)));
    found.box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (event.key === "Escape") told.hidden = true;
      if (!step) return;
      event.preventDefault();
      const from = here?.found === found ? here.at : step > 0 ? -step : found.tokens.length;
      tell(found, Math.min(Math.max(from + step, 0), found.tokens.length - 1));
      here.token.scrollIntoView({ block: "nearest" });
    });
  }
}
