// Shows the numbers of a token on hover, click or arrow keys, and the effect of the selected correction.
{
  const data = JSON.parse(document.getElementById("tokens").textContent);
  const info = document.querySelector(".token-info");
  const sections = [...document.querySelectorAll(".sequence")].map((section, index) => ({
    section, index, box: section.querySelector(".tokens"), tokens: [...section.querySelectorAll(".tokens i")], state: section.querySelector(".state"),
  }));
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const part = (name) => document.querySelector(`[data-part="${name}"]`);
  const choice = part("correction");
  const short = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());
  let here = null;

  const showToken = (found, at) => {
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
    const applied = data.corrections[choice.value];
    if (applied) {
      const own = applied.sequences[found.index];
      lines.push(["weight before normalization", short(own.weights[at])]);
      if (applied.sentences[own.why[at]]) lines.push(["rejected by", applied.sentences[own.why[at]]]);
    }
    if (numbers.experts) lines.push(["experts that differ", numbers.experts[at]]);
    const list = document.createElement("dl");
    for (const [name, value] of lines) list.append(make("dt", name), make("dd", value));
    info.replaceChildren(list);
    info.hidden = false;
  };

  const apply = () => {
    let [rejectedTokens, all, rejectedSequences] = [0, 0, 0];
    for (const { section, index, tokens, state } of sections) {
      const own = data.corrections[choice.value].sequences[index];
      tokens.forEach((token, at) => {
        token.classList.toggle("rejected", own.states[at] === 1);
        token.classList.toggle("bound", own.states[at] === 2);
      });
      const { total } = data.sequences[index]; // a long sequence is shown in part
      const rejected = total - own.kept;
      const whole = rejected > 0 && own.kept === 0;
      section.classList.toggle("fully-rejected", whole);
      state.textContent = rejected ? rejected.toLocaleString("en") + " rejected" : "";
      rejectedTokens += rejected;
      all += total;
      rejectedSequences += whole;
    }
    part("effect").textContent = `rejects ${rejectedTokens.toLocaleString("en")} of ${all.toLocaleString("en")} tokens of these sequences, and ${rejectedSequences} of ${sections.length} sequences as a whole`;
  };

  if (data.corrections.length) {
    choice.replaceChildren(...data.corrections.map((applied, index) => Object.assign(make("option", applied.name), { value: index })));
    choice.addEventListener("change", apply);
    document.querySelector(".correction-bar").hidden = false;
    apply();
  }
  for (const found of sections) {
    const at = (event) => found.tokens.indexOf(event.target.closest("i"));
    for (const kind of ["pointerover", "click"]) found.box.addEventListener(kind, (event) => at(event) >= 0 && showToken(found, at(event)));
    found.box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (event.key === "Escape") info.hidden = true;
      if (!step) return;
      event.preventDefault();
      const from = here?.found === found ? here.at : step > 0 ? -step : found.tokens.length;
      showToken(found, Math.min(Math.max(from + step, 0), found.tokens.length - 1));
      here.token.scrollIntoView({ block: "nearest" });
    });
  }
}
