// Curves in groups, and the overview above them.

const metricValues = Object.fromEntries(
  Object.entries(run.metrics.values).map(([name, values]) => [
    name,
    values.map((value) => (value === null ? null : Number(value))),
  ]),
);
const MAX_FOUND = 60; // charts of a search

function listMarks() {
  const marks = new Map();
  for (const [step, , text] of run.warnings) {
    marks.set(step, [...(marks.get(step) || []), text]);
  }
  const warnings = [...marks].map(([step, lines]) => ({
    step,
    className: "",
    text: `step ${step}\n${lines.join("\n")}`,
  }));
  const starts = run.starts.slice(1).map((start) => ({
    step: start.step,
    className: "start",
    text: `resumed at step ${start.step}, ${formatTime(start.time)}`,
  }));
  return [...starts, ...warnings];
}

const marks = listMarks();

function showCurves() {
  const query = byId("metric-search").value.trim().toLowerCase(),
    smoothing = Number(byId("smoothing").value);
  const target = byId("curve-groups");
  const draw = (names) =>
    make(
      "div",
      { className: "charts" },
      ...names.map((name) => makeChart(name, run.metrics.steps, metricValues[name], marks, smoothing)),
    );
  if (query) {
    const found = Object.keys(metricValues).filter((name) => name.toLowerCase().includes(query));
    const more = found.length > MAX_FOUND ? `, the first ${MAX_FOUND} are shown` : "";
    target.replaceChildren(
      make("p", { className: "muted", textContent: `${formatCount(found.length, "metric")}${more}` }),
      draw(found.slice(0, MAX_FOUND)),
    );
    return;
  }
  const grouped = new Set(run.groups.flatMap((group) => group.names));
  const others = Object.keys(metricValues).filter((name) => !grouped.has(name));
  target.replaceChildren(
    ...run.groups.flatMap((group) => [
      make("h3", { className: "group-title", textContent: group.title }),
      draw(group.names.slice(0, MAX_FOUND)),
    ]),
    others.length ? makeOthers(others, draw) : "",
  );
  if (!run.metrics.steps.length) target.textContent = "No step is done yet.";
}

// Return the other metrics, drawn when they are opened.
function makeOthers(names, draw) {
  const summary = make("summary", {
    className: "muted",
    textContent: `${formatCount(names.length, "other metric")}`,
  });
  const details = make("details", { className: "group-title" }, summary);
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(draw(names));
  });
  return details;
}

const listValues = (name) => (metricValues[name] || []).filter((value) => value !== null && Number.isFinite(value));

function showOverview() {
  const { state, metrics } = run,
    seconds = listValues("timing_s/step");
  const tiles = [makeLastTile("reward", ["reward/mean", "train/loss"])];
  const validations = Object.keys(metricValues).filter((name) => /^val\/.*(mean@|loss)/.test(name));
  for (const name of validations.slice(0, 3)) tiles.push(makeBestTile(name));
  tiles.push(makeLastTile("response length", ["response_length/mean"], "tokens, mean"));
  tiles.push(makeLastTile("entropy", ["actor/entropy"]));
  const recent = seconds.slice(-20).sort((a, b) => a - b);
  if (recent.length) {
    tiles.push(makeTile("time per step", formatDuration(recent[recent.length >> 1]), "median of the last 20"));
  }
  tiles.push(makeLastTile("throughput", ["perf/throughput"], "tokens/s"));
  if (run.began && state.time) {
    const note =
      run.starts.length > 1 ? `${formatCount(run.starts.length, "start")}` : `began ${formatTime(run.began)}`;
    tiles.push(makeTile("duration", formatDuration(state.time - run.began), note));
  }
  byId("overview").replaceChildren(
    make("div", { className: "tiles" }, ...tiles.filter(Boolean)),
    makeNotes(),
    makeWarnings() || "",
  );
}

const makeTile = (label, value, note) =>
  make(
    "div",
    { className: "card tile" },
    make("div", { className: "label" }, ...makeBreakable(label)),
    make("div", { className: "value", textContent: value }),
    make("div", { className: "note", textContent: note }),
  );

function makeLastTile(label, names, note = "") {
  const name = names.find((each) => listValues(each).length);
  if (!name) return null;
  const values = listValues(name);
  return makeTile(label, formatNumber(values[values.length - 1]), note || `${formatNumber(values[0])} at first`);
}

function makeBestTile(name) {
  const values = listValues(name),
    pick = name.endsWith("loss") ? Math.min : Math.max;
  if (!values.length) return null;
  const best = values.reduce((a, b) => pick(a, b)),
    step = run.metrics.steps[metricValues[name].indexOf(best)];
  return makeTile(name, formatNumber(values[values.length - 1]), `best ${formatNumber(best)} at step ${step}`);
}

function makeNotes() {
  const lines = [`Made ${formatTime(run.built)} by verl ${run.version}.`, ...run.omissions];
  return make("ul", { className: "notes" }, ...lines.map((line) => make("li", { textContent: line })));
}

function makeWarnings() {
  if (!run.warnings.length) return null;
  const items = run.warnings
    .slice()
    .sort((a, b) => b[0] - a[0])
    .map(([step, time, text, rule]) =>
      make(
        "li",
        {},
        setTip(make("span", { className: "step", textContent: `step ${step}` }), () => formatTime(time)),
        setTip(make("span", { textContent: text }), () => run.rules[rule] || text),
      ),
    );
  const summary = make("summary", { textContent: formatCount(run.warnings.length, "warning") });
  return make(
    "details",
    { className: "card warnings", open: run.warnings.length <= 5 },
    summary,
    make("ol", {}, ...items),
  );
}
