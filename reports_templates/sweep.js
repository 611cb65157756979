// Explorer of a sweep: sliders that select a point. The data is in the page, and the tables also contain it.
{
  const data = JSON.parse(document.getElementById("points").textContent);
  const box = document.getElementById("explorer");
  const part = (name) => box.querySelector(`[data-part="${name}"]`);
  const element = (tag, text, properties = {}) => make(tag, { textContent: text, ...properties });
  const [run, study, framework] = ["run", "study", "framework"].map(part);
  const choose = (select, names) => select.replaceChildren(...names.map((name, index) => element("option", name, { value: index })));
  let places = [];

  const point = () => data.studies[study.value].axes.reduce((sum, axis, index) => sum * axis.texts.length + places[index], 0);

  const cross = () => {
    document.querySelectorAll(".cross").forEach((line) => line.remove());
    data.studies[study.value].axes.forEach((axis, index) => {
      if (!axis.values) return;
      const name = [run.value, data.studies[study.value].place, index].join("-");
      for (const figure of document.querySelectorAll(`figure[data-axis="${name}"]`)) {
        const state = figures.get(figure);
        if (!state) continue;
        const x = state.plot.scale("x").apply(axis.values[places[index]]);
        const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
        for (const [key, value] of Object.entries({ class: "cross", x1: x, x2: x, y1: 26, y2: state.height - 38 })) line.setAttribute(key, value);
        state.plot.append(line);
      }
    });
  };

  const show = () => {
    const [chosen, at] = [data.studies[study.value], point()];
    const values = data.runs[run.value].studies[study.value].values;
    part("values").replaceChildren(...chosen.titles.map(([title, anchor], index) => {
      const tile = element("div", "");
      const name = element("dt", "");
      name.append(element("a", title, { href: "#" + anchor }));
      tile.append(name, element("dd", values[index][at], { className: "value" }));
      return tile;
    }));
    part("config").textContent = chosen.configs.points[at][framework.value].map((line) => chosen.configs.lines[line]).join("\n");
    cross();
  };

  const begin = () => {
    const chosen = data.studies[study.value];
    const previous = framework.selectedOptions[0]?.textContent; // the list only contains frameworks that can express the correction
    choose(framework, chosen.configs.names);
    framework.value = Math.max(chosen.configs.names.indexOf(previous), 0);
    let rest = data.runs[run.value].studies[study.value].start;
    places = chosen.axes.map((axis) => axis.texts.length).reduceRight((found, size) => {
      const place = rest % size;
      rest = (rest - place) / size;
      return [place, ...found];
    }, []);
    part("axes").replaceChildren(...chosen.axes.map((axis, index) => {
      const label = element("label", "");
      const output = element("output", axis.texts[places[index]]);
      const slider = element("input", "", { type: "range", min: 0, max: axis.texts.length - 1, value: places[index] });
      slider.setAttribute("aria-label", axis.path);
      slider.setAttribute("aria-valuetext", axis.texts[places[index]]);
      slider.addEventListener("input", () => {
        places[index] = Number(slider.value);
        output.textContent = axis.texts[places[index]];
        slider.setAttribute("aria-valuetext", output.textContent);
        show();
      });
      label.append(element("span", axis.path), output, slider);
      return label;
    }));
    show();
  };

  if (data.studies.length) {
    choose(run, data.runs.map((one) => one.name));
    choose(study, data.studies.map((one) => one.name));
    run.parentElement.hidden = data.runs.length < 2;
    for (const select of [run, study]) select.addEventListener("change", begin);
    framework.addEventListener("change", show);
    box.hidden = false;
    begin();
  }
}
