// Settings, starts, and the environment of the run.

function showSettings() {
  const last = run.starts[run.starts.length - 1];
  const changed = last ? last.settings : run.settings.filter(([, , origin]) => origin && origin !== "default");
  byId("settings-content").replaceChildren(
    make(
      "div",
      { className: "columns" },
      make(
        "div",
        { className: "stack" },
        makeTable("Changed settings", changed, "All settings have their default values."),
        makeStarts(),
      ),
      make("div", { className: "stack" }, makeAllSettings(), makeEnvironment(last ? last.environment : {})),
    ),
  );
}

function makeRows(rows) {
  return make(
    "table",
    {},
    make(
      "tbody",
      {},
      ...rows.map(([key, value, origin]) =>
        make(
          "tr",
          {},
          make("td", { className: "mono" }, ...makeBreakable(key)),
          make("td", { className: "mono", textContent: value }),
          make("td", { className: "muted", textContent: origin }),
        ),
      ),
    ),
  );
}

const makeTable = (title, rows, empty) =>
  make(
    "div",
    { className: "card" },
    make("h3", { textContent: title }),
    rows.length
      ? make("div", { className: "tall" }, makeRows(rows))
      : make("span", { className: "muted", textContent: empty }),
  );

function makeAllSettings() {
  const list = make("div", { className: "tall" });
  const search = make("input", {
    type: "search",
    id: "setting-search",
    placeholder: "search settings",
    ariaLabel: "Search settings",
  });
  const draw = () => {
    const query = search.value.trim().toLowerCase();
    list.replaceChildren(makeRows(run.settings.filter((row) => row.join(" ").toLowerCase().includes(query))));
  };
  search.oninput = debounce(draw, 100);
  draw();
  return make(
    "div",
    { className: "card" },
    make("div", { className: "bar" }, make("h3", { textContent: `All ${run.settings.length} settings` }), search),
    run.settings.length ? list : make("span", { className: "muted", textContent: "settings.yaml is missing." }),
  );
}

function makeStarts() {
  const rows = run.starts.map((start, index) =>
    make(
      "div",
      {},
      make("div", {
        textContent: `${index ? "Resumed at" : "Started at"} step ${start.step}, ${formatTime(start.time)}`,
      }),
      make("pre", { className: "muted", textContent: start.command }),
    ),
  );
  return make(
    "div",
    { className: "card stack" },
    make("h3", { textContent: "Starts" }),
    ...(rows.length ? rows : [make("span", { className: "muted", textContent: "starts.jsonl is missing." })]),
  );
}

function makeEnvironment(environment) {
  const parts = Object.entries(environment).map(([title, rows]) =>
    make(
      "details",
      { open: title === "versions" },
      make("summary", { textContent: title }),
      makeRows(Object.entries(rows).map(([name, value]) => [name, value, ""])),
    ),
  );
  return make(
    "div",
    { className: "card" },
    make("h3", { textContent: "Environment" }),
    ...(parts.length ? parts : [make("span", { className: "muted", textContent: "Not recorded." })]),
  );
}
