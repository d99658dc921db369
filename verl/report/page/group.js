// The responses to one prompt, side by side, in a dialog.

let coloringName = "none";

// Return the positions of the samples of the same file and prompt.
function listGroup(position) {
  const members = [];
  const isMember = (each) =>
    samples.file[each] === samples.file[position] && samples.group[each] === samples.group[position];
  for (let each = 0; each < sampleCount; each++) if (isMember(each)) members.push(each);
  return members;
}

async function openGroup(position) {
  const dialog = byId("group");
  chooseSample(position);
  if (!dialog.open) dialog.showModal();
  history.replaceState(null, "", `#${linkOf(position)}`);
  while (!texts[position]) await new Promise((resolve) => setTimeout(resolve, 50)); // they are still being read
  const members = listGroup(position),
    tokens = await readTokens(samples.file[position]);
  if (view.chosen !== position) return; // another one was chosen in the meantime
  const drawn = members.map((member) => ({
    member,
    tokens: tokens[member],
    segments: tokens[member] ? makeTokenSegments(tokens[member]) : null,
  }));
  const legend = make("span");
  const colored = drawn.filter((each) => each.tokens);
  const applyColors = () => legend.replaceChildren(colorTokens(coloringName, colored) || "");
  const responses = make("div", { className: "responses" }, ...drawn.map((each) => makeResponse(each, position)));
  dialog.replaceChildren(
    makeTop(position, members, colored.length, legend, applyColors),
    make("div", { className: "scroll" }, makePrompt(texts[position].prompt), responses),
  );
  applyColors();
  const chosen = responses.querySelector(".chosen");
  responses.scrollLeft = chosen.offsetLeft - responses.offsetLeft - 8;
}

function makeTop(position, members, withTokens, legend, applyColors) {
  const { truth, row } = texts[position].facts;
  const select = make(
    "select",
    { id: "coloring", ariaLabel: "Color tokens by", disabled: !withTokens },
    ...Object.keys(COLORINGS).map((name) =>
      make("option", { value: name, textContent: name, selected: name === coloringName }),
    ),
  );
  select.onchange = () => {
    coloringName = select.value;
    applyColors();
  };
  const scores = members.map(scoreOf).filter((score) => !Number.isNaN(score));
  const mean = scores.length ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
  return make(
    "div",
    { className: "top" },
    make(
      "div",
      { className: "bar" },
      make("h2", {
        id: "group-title",
        textContent: `Step ${stepOf(position)}, ${splitOf(position)} group ${samples.group[position]}`,
      }),
      make("label", {}, "color tokens by", select),
      legend,
      make("button", { className: "end", textContent: "previous", onclick: () => openNext(-1) }),
      make("button", { textContent: "next", onclick: () => openNext(1) }),
      make("button", { textContent: "close", onclick: () => byId("group").close() }),
    ),
    make(
      "div",
      { className: "facts" },
      ...makeFacts({
        responses: new Set(members.map((member) => samples.index[member])).size,
        "mean score": mean === null ? "–" : formatNumber(mean),
        source: samples.sources[samples.source[position]] || "–",
        row: row ?? "–",
        "ground truth": truth || "–",
      }),
      withTokens < members.length
        ? make("span", { textContent: "texts without tokens: see the notes at the top of the page" })
        : null,
    ),
  );
}

const makeFacts = (facts) =>
  Object.entries(facts).map(([name, value]) =>
    make("span", {}, `${name} `, make("b", { textContent: String(value) })),
  );

function makePrompt(prompt) {
  const text = make("pre", { className: "text", textContent: prompt });
  return make(
    "details",
    { className: "prompt", open: true },
    make("summary", { className: "muted", textContent: "prompt" }),
    text,
  );
}

function makeResponse({ member, segments }, chosen) {
  const { facts, segments: plain } = texts[member];
  const branch = samples.branch[member] ? `, branch ${samples.branch[member]}` : "";
  const shown = {
    score: formatNumber(samples.score[member] === null ? null : Number(samples.score[member])),
    tokens: samples.tokens[member],
    end: samples.finishes[samples.finish[member]] || "–",
    ...Object.fromEntries(
      Object.entries(facts.metrics).map(([name, value]) => [
        name,
        formatNumber(value === null ? null : Number(value)),
      ]),
    ),
    ...(facts.engines.length ? { engine: facts.engines.join(", ") } : {}),
    ...(facts.generation_s === null ? {} : { generated: formatDuration(facts.generation_s) }),
    ...(facts.scoring_s === null ? {} : { scored: formatDuration(facts.scoring_s) }),
  };
  const parts = segments
    ? segments.map(({ inserted, spans }) => makeSegment(inserted, spans))
    : plain.map((text, index) => makeSegment(index % 2 === 1, [text]));
  const many = parts.length > 1;
  return make(
    "article",
    { className: `card response${member === chosen ? " chosen" : ""}`, dataset: { position: member } },
    make("h3", { textContent: `response ${samples.index[member]}${branch}` }),
    make("div", { className: "facts" }, ...makeFacts(shown)),
    ...parts.map((part) => part(many)),
  );
}

const makeSegment = (inserted, children) => (hasLabel) =>
  make(
    "div",
    { className: `segment ${inserted ? "inserted" : "generated"}` },
    hasLabel ? make("div", { className: "who", textContent: inserted ? "tool result or next turn" : "model" }) : null,
    make("pre", { className: "text" }, ...children),
  );

function openNext(offset) {
  const position = moveChosen(offset);
  if (position >= 0) openGroup(position);
}

// The part of the address that opens a sample: split, step, group, response and branch.
function linkOf(position) {
  return [
    "sample",
    splitOf(position),
    stepOf(position),
    samples.group[position],
    samples.index[position],
    samples.branch[position],
  ].join("-");
}

function openLinked() {
  const link = decodeURIComponent(location.hash.slice(1));
  if (!link.startsWith("sample-")) return;
  for (let position = 0; position < sampleCount; position++) {
    if (linkOf(position) === link) {
      openGroup(position);
      return;
    }
  }
}

byId("group").addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
