// Where the time goes: a bar of phases per step, and what each worker did during one step.

const PHASES = ["gen", "plan", "sleep", "prepare", "update", "sync"];
const EXTRAS = ["validation", "save"];
const MAX_BARS = 150;
const colorOf = (phase) => `var(--${[...PHASES, ...EXTRAS].includes(phase) ? phase : "other"})`;

// Return [{from, to, parts: {phase: seconds}, total}], means of several steps if there are many.
function listBars() {
  const { steps } = run.metrics,
    get = (name, index) => metricValues[`timing_s/${name}`]?.[index] ?? null;
  const rows = steps.flatMap((step, index) => {
    const known = [...PHASES, ...EXTRAS].filter((name) => get(name, index) !== null);
    const total = get("step", index);
    if (total === null) return [];
    const parts = Object.fromEntries(known.map((name) => [name, get(name, index)]));
    const rest = total - PHASES.reduce((sum, name) => sum + (parts[name] || 0), 0);
    return [{ step, parts: { ...parts, other: Math.max(0, rest) } }];
  });
  const size = Math.ceil(rows.length / MAX_BARS) || 1,
    bars = [];
  for (let start = 0; start < rows.length; start += size) {
    const members = rows.slice(start, start + size),
      parts = {};
    for (const { parts: each } of members) {
      for (const [name, seconds] of Object.entries(each)) parts[name] = (parts[name] || 0) + seconds / members.length;
    }
    const total = Object.values(parts).reduce((sum, seconds) => sum + seconds, 0);
    bars.push({ from: members[0].step, to: members[members.length - 1].step, parts, total });
  }
  return bars;
}

function describeBar(bar) {
  const title = bar.from === bar.to ? `step ${bar.from}` : `steps ${bar.from} to ${bar.to}, mean`;
  const lines = Object.entries(bar.parts)
    .filter(([, seconds]) => seconds > 0.0005)
    .map(([name, seconds]) => `${name}  ${formatDuration(seconds)}`);
  return [`${title}: ${formatDuration(bar.total)}`, ...lines].join("\n");
}

function showTimeline() {
  const bars = listBars(),
    target = byId("timeline-content");
  const lanes = make("div", { className: "card" });
  if (!bars.length) {
    target.textContent = "No times were recorded yet.";
    return;
  }
  const high = Math.max(...bars.map((bar) => bar.total)) * 1.04 || 1;
  const select = (step) => {
    for (const [index, column] of columns.entries()) {
      column.classList.toggle("chosen", bars[index].from <= step && step <= bars[index].to);
    }
    showLanes(lanes, step, select);
  };
  const columns = bars.map((bar) => {
    const parts = [...PHASES, "other", ...EXTRAS]
      .filter((name) => bar.parts[name])
      .map((name) =>
        make("i", {
          style: { height: `${(100 * bar.parts[name]) / high}%`, background: colorOf(name) },
        }),
      );
    const column = make("div", { className: "column", onclick: () => select(bar.to) }, ...parts);
    return setTip(column, () => describeBar(bar));
  });
  const ticks = chooseTicks(0, high).map((tick) =>
    make(
      "div",
      {
        className: "tick",
        style: { bottom: `${(100 * tick) / high}%` },
      },
      make("span", { textContent: formatDuration(tick) }),
    ),
  );
  const ends = make(
    "div",
    { className: "bar-ends" },
    make("span", { textContent: `step ${bars[0].from}` }),
    make("span", { textContent: `${bars[bars.length - 1].to}` }),
  );
  target.replaceChildren(
    make(
      "div",
      { className: "stack" },
      make(
        "div",
        { className: "card" },
        makeLegend(bars),
        make("div", { className: "bars" }, ...ticks, ...columns),
        ends,
      ),
      lanes,
    ),
  );
  select(chooseStep(bars));
}

// Return the last step whose phases were recorded, or the last one.
function chooseStep(bars) {
  const steps = Object.keys(run.phases.steps).map(Number);
  return steps.length ? Math.max(...steps) : bars[bars.length - 1].to;
}

function makeLegend(bars) {
  const names = [...PHASES, ...EXTRAS, "other"].filter((name) => bars.some((bar) => bar.parts[name] > 0.0005));
  return make(
    "div",
    { className: "legend" },
    ...names.map((name) => make("span", {}, make("i", { style: { background: colorOf(name) } }), name)),
  );
}

// Show what each worker did in a step. A worker is idle while none of its phases is going on.
function showLanes(target, step, select) {
  const steps = Object.keys(run.phases.steps)
      .map(Number)
      .sort((a, b) => a - b),
    position = steps.indexOf(step);
  if (!steps.length) {
    target.replaceChildren(
      make("span", { className: "muted", textContent: "phases.jsonl has no phases of workers." }),
    );
    return;
  }
  const before = steps.filter((each) => each < step).pop(),
    after = steps.find((each) => each > step);
  const bar = make(
    "div",
    { className: "bar" },
    make("h3", { textContent: `Workers in step ${step}` }),
    make("button", { textContent: "previous", disabled: before === undefined, onclick: () => select(before) }),
    make("button", { textContent: "next", disabled: after === undefined, onclick: () => select(after) }),
  );
  const rows = position < 0 ? [] : run.phases.steps[step];
  if (!rows.length) {
    target.replaceChildren(bar, make("span", { className: "muted", textContent: "Not recorded for this step." }));
    return;
  }
  const end = Math.max(...rows.map((row) => row[3])) || 1;
  const workers = [...new Set(rows.map((row) => row[0]))];
  const cells = workers.flatMap((worker) =>
    makeLane(
      run.phases.workers[worker],
      rows.filter((row) => row[0] === worker),
      end,
    ),
  );
  const axis = make(
    "div",
    { className: "axis" },
    make("span", { textContent: "0" }),
    make("span", { textContent: formatDuration(end / 1000) }),
  );
  target.replaceChildren(bar, make("div", { className: "lanes" }, ...cells, make("span"), axis, make("span")));
}

function makeLane(worker, rows, end) {
  const lane = make(
    "div",
    { className: "lane" },
    ...rows.map(([, name, from, to]) => {
      const phase = run.phases.names[name];
      const block = make("i", {
        style: { left: `${(100 * from) / end}%`, width: `${(100 * (to - from)) / end}%`, background: colorOf(phase) },
      });
      return setTip(
        block,
        () => `${worker}: ${phase}\n${formatDuration((to - from) / 1000)}, from ${formatDuration(from / 1000)}`,
      );
    }),
  );
  const idle = 1 - measureUnion(rows.map((row) => [row[2], row[3]])) / end;
  return [
    make("span", { textContent: worker }),
    lane,
    make("span", { className: "muted number", textContent: `${Math.round(100 * idle)}% idle` }),
  ];
}

// Return the length of what the intervals cover.
function measureUnion(intervals) {
  let covered = 0,
    until = -Infinity;
  for (const [from, to] of intervals.sort((a, b) => a[0] - b[0])) {
    covered += Math.max(0, to - Math.max(from, until));
    until = Math.max(until, to);
  }
  return covered;
}
