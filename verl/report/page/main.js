// Draw the page, then read the texts of samples. Keys and the theme.

function showHeader() {
  const { state } = run;
  byId("name").textContent = document.title = run.name;
  byId("state").textContent = state.name;
  byId("state").classList.add(state.name);
  const total = state.total ? ` of ${state.total.toLocaleString("en-US")}` : "";
  const age = state.time
    ? `, last record ${formatDuration(Math.max(0, run.built - state.time))} before this page was made`
    : "";
  byId("progress").textContent = `step ${state.step.toLocaleString("en-US")}${total}${age}`;
  byId("reload").hidden = !location.protocol.startsWith("http");
  byId("reload").onclick = () => location.reload();
}

function isDark() {
  const chosen = document.documentElement.style.colorScheme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  byId("theme").textContent = isDark() ? "Light" : "Dark";
}

function handleKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !sampleCount) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName),
    isOpen = byId("group").open;
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const inTable = isOpen || document.activeElement === byId("sample-rows");
  const offsets = {
    j: 1,
    k: -1,
    ...(inTable ? { ArrowDown: 1, ArrowUp: -1 } : {}),
    ...(isOpen ? { ArrowRight: 1, ArrowLeft: -1 } : {}),
  };
  if (event.key in offsets) {
    if (isOpen) openNext(offsets[event.key]);
    else moveChosen(offsets[event.key]);
  } else if (event.key === "/") {
    byId("group").close();
    byId("samples").scrollIntoView();
    byId("sample-search").focus();
  } else if (event.key === "Enter" && !isOpen && view.chosen >= 0 && event.target.tagName !== "BUTTON") {
    openGroup(view.chosen);
  } else {
    return;
  }
  event.preventDefault();
}

showHeader();
showOverview();
showCurves();
showTimeline();
showSamples();
showSettings();
byId("theme").textContent = isDark() ? "Light" : "Dark";
byId("theme").onclick = switchTheme;
byId("smoothing").onchange = showCurves;
byId("metric-search").oninput = debounce(showCurves, 120);
document.addEventListener("keydown", handleKey);
document.documentElement.dataset.state = "drawn";
if (sampleCount) {
  await readTexts(() => {
    drawRows();
    showCount();
  });
  if (byId("sample-search").value) applyFilters();
  openLinked();
}
document.documentElement.dataset.state = "complete";
