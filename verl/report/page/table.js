// The table of samples. Only the rows in view exist as elements.

const ROW_HEIGHT = 30;
const samples = run.samples;
const sampleCount = samples.file.length;
const stepOf = (position) => samples.files[samples.file[position]][1];
const splitOf = (position) => samples.files[samples.file[position]][0];
const scoreOf = (position) => (samples.score[position] === null ? NaN : Number(samples.score[position]));

const COLUMNS = [
  { title: "step", key: stepOf, right: true },
  { title: "split", key: splitOf, wide: true },
  { title: "group", key: (position) => samples.group[position], right: true, wide: true },
  { title: "no.", key: (position) => samples.index[position], right: true, wide: true },
  { title: "score", key: scoreOf, right: true },
  { title: "tokens", key: (position) => samples.tokens[position], right: true },
  { title: "end", key: (position) => samples.finishes[samples.finish[position]], wide: true },
  { title: "source", key: (position) => samples.sources[samples.source[position]], wide: true },
  { title: "response", key: null },
];
const view = { rows: [], sort: null, descending: false, chosen: -1 }; // `rows` and `chosen` are positions of samples

function makeFilters() {
  const number = (id, title) =>
    make("input", { type: "number", id, step: "any", ariaLabel: title, oninput: applyLater });
  const range = (name, id) =>
    make("label", {}, name, number(`${id}-low`, `${name}, lowest`), "–", number(`${id}-high`, `${name}, highest`));
  const choice = (name, id, values) =>
    make(
      "label",
      {},
      name,
      make(
        "select",
        { id, onchange: applyFilters },
        make("option", { value: "", textContent: "all" }),
        ...values.map((value, index) => make("option", { value: String(index + 1), textContent: value || "–" })),
      ),
    );
  return make(
    "div",
    { className: "filters" },
    make("input", {
      type: "search",
      id: "sample-search",
      placeholder: "search texts ( / )",
      ariaLabel: "Search texts",
      oninput: applyLater,
    }),
    range("step", "step"),
    choice("split", "split", ["train", "val"]),
    range("score", "score"),
    range("tokens", "tokens"),
    samples.finishes.length > 1 ? choice("end", "finish", samples.finishes) : null,
    samples.sources.length > 1 ? choice("source", "source", samples.sources) : null,
    make("button", { textContent: "clear", onclick: clearFilters }),
  );
}

function showSamples() {
  const target = byId("samples-content");
  if (!sampleCount) {
    target.textContent = "No samples were recorded yet (trainer.samples.per_step).";
    return;
  }
  const head = make(
    "div",
    { className: "row head" },
    ...COLUMNS.map((column, index) =>
      make("button", {
        className: classOf(column),
        textContent: column.title,
        disabled: !column.key,
        onclick: () => sortBy(index),
      }),
    ),
  );
  const body = make("div", { className: "body", id: "sample-rows", tabIndex: 0, onscroll: drawRows });
  body.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) openGroup(Number(row.dataset.position));
  });
  target.replaceChildren(
    makeFilters(),
    make("div", { className: "table" }, head, body),
    make("p", {
      className: "muted",
      textContent: "j and k: next and previous sample, Enter: open its group, /: search, Escape: close.",
    }),
  );
  applyFilters();
}

const classOf = (column) => `${column.right ? "right" : ""} ${column.wide ? "wide" : ""}`;

function makeRangeTest(id, key) {
  const [low, high] = ["low", "high"].map((end) => byId(`${id}-${end}`).value);
  if (low === "" && high === "") return null;
  const from = low === "" ? -Infinity : Number(low),
    to = high === "" ? Infinity : Number(high);
  return (position) => key(position) >= from && key(position) <= to;
}

function makeChoiceTest(id, key) {
  const value = byId(id)?.value;
  return value ? (position) => key(position) === Number(value) - 1 : null;
}

function makeTextTest() {
  const query = byId("sample-search").value.trim();
  if (!query) return null;
  const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
  return (position) => {
    const text = texts[position];
    return (
      Boolean(text) &&
      (pattern.test(text.prompt) ||
        pattern.test(text.facts.truth) ||
        text.segments.some((segment) => pattern.test(segment)))
    );
  };
}

function applyFilters() {
  const tests = [
    makeRangeTest("step", stepOf),
    makeRangeTest("score", scoreOf),
    makeRangeTest("tokens", (position) => samples.tokens[position]),
    makeChoiceTest("split", (position) => (splitOf(position) === "train" ? 0 : 1)),
    makeChoiceTest("finish", (position) => samples.finish[position]),
    makeChoiceTest("source", (position) => samples.source[position]),
    makeTextTest(),
  ].filter(Boolean);
  view.rows = [];
  for (let position = 0; position < sampleCount; position++) {
    if (tests.every((test) => test(position))) view.rows.push(position);
  }
  sortRows();
}

const applyLater = debounce(applyFilters, 150);

function clearFilters() {
  for (const element of document.querySelectorAll(".filters input, .filters select")) element.value = "";
  applyFilters();
}

function sortBy(index) {
  view.descending = view.sort === index && !view.descending;
  view.sort = index;
  sortRows();
}

function sortRows() {
  const column = COLUMNS[view.sort];
  if (column) {
    const sign = view.descending ? -1 : 1;
    view.rows.sort((a, b) => sign * compare(column.key(a), column.key(b)) || a - b);
  }
  for (const [index, button] of document.querySelectorAll(".row.head button").entries()) {
    button.classList.toggle("sorted", index === view.sort);
    button.textContent = COLUMNS[index].title + (index === view.sort ? (view.descending ? " ↓" : " ↑") : "");
  }
  byId("sample-rows").scrollTop = 0;
  drawRows();
  showCount();
}

// Numbers before what is not one.
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") {
    return Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : a - b;
  }
  return String(a ?? "").localeCompare(String(b ?? ""));
}

function showCount() {
  const all = formatCount(sampleCount, "sample"),
    found = view.rows.length.toLocaleString("en-US");
  const reading = texts.length < sampleCount ? ", reading texts …" : "";
  byId("sample-count").textContent = (view.rows.length < sampleCount ? `${found} of ${all}` : all) + reading;
}

function drawRows() {
  const body = byId("sample-rows");
  const first = Math.max(0, Math.floor(body.scrollTop / ROW_HEIGHT) - 5);
  const count = Math.ceil((body.clientHeight || 600) / ROW_HEIGHT) + 10;
  const filler = make("div", { style: { height: `${view.rows.length * ROW_HEIGHT}px` } });
  body.replaceChildren(
    filler,
    ...view.rows.slice(first, first + count).map((position, index) => drawRow(position, first + index)),
  );
}

function drawRow(position, place) {
  const chosen = position === view.chosen ? " chosen" : "";
  const cells = COLUMNS.map((column) =>
    make("span", {
      className: `${classOf(column)}${column.key ? "" : " mono"}`,
      textContent: column.key ? formatCell(column.key(position)) : previewOf(position),
    }),
  );
  return make(
    "div",
    { className: `row${chosen}`, dataset: { position }, style: { top: `${place * ROW_HEIGHT}px` } },
    ...cells,
  );
}

const formatCell = (value) => (typeof value === "number" ? formatNumber(value) : (value ?? "–"));

function previewOf(position) {
  const text = texts[position];
  return text ? text.segments.join(" ⏎ ").slice(0, 300).replace(/\s+/g, " ") : "…";
}

// Choose the next (1) or previous (-1) sample of the table; returns its position, -1 if there is none.
function moveChosen(offset) {
  const place = view.rows.indexOf(view.chosen);
  const next = place < 0 ? 0 : Math.min(view.rows.length - 1, Math.max(0, place + offset));
  if (view.rows[next] === undefined) return -1;
  chooseSample(view.rows[next]);
  return view.chosen;
}

function chooseSample(position) {
  view.chosen = position;
  const body = byId("sample-rows"),
    top = view.rows.indexOf(position) * ROW_HEIGHT;
  if (top < body.scrollTop) body.scrollTop = top;
  else if (top + ROW_HEIGHT > body.scrollTop + body.clientHeight)
    body.scrollTop = top + ROW_HEIGHT - body.clientHeight;
  drawRows();
}
