// A line chart. The curve is an SVG path in percent, everything else is HTML, so that charts need no layout code.

const charts = new Set(); // those on the page share the cursor

function smooth(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

// Return two to five round numbers in a range.
function chooseTicks(low, high) {
  const raw = (high - low) / 4,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw) || raw;
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Number(tick.toPrecision(12)));
  }
  return ticks;
}

// Return [low, high] of the finite values, never empty.
function findRange(values) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function drawPath(points, className) {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute(
    "d",
    points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join(""),
  );
  path.setAttribute("class", className);
  return path;
}

// Return the chart of one metric. `marks` are {step, className, text}; values may be null, NaN or infinite.
function makeChart(name, steps, values, marks, smoothing) {
  const known = steps.map((_, index) => index).filter((index) => values[index] !== null);
  const shown = known.filter((index) => Number.isFinite(values[index]));
  const [firstStep, lastStep] = [steps[0], steps[steps.length - 1]];
  const [low, high] = findRange(values);
  const toX = (step) => (lastStep === firstStep ? 50 : (100 * (step - firstStep)) / (lastStep - firstStep));
  const toY = (value) => 100 - (100 * (value - low)) / (high - low);
  const toPoints = (numbers) => shown.map((index) => [toX(steps[index]), toY(numbers[index])]);

  const plot = make("div", { className: "plot" });
  for (const tick of chooseTicks(low, high)) {
    const label = make("span", { textContent: formatNumber(tick) });
    plot.append(make("div", { className: "tick", style: { top: `${toY(tick)}%` } }, label));
  }
  plot.append(make("span", { className: "x first", style: { left: "0" }, textContent: String(firstStep) }));
  if (lastStep !== firstStep) {
    plot.append(make("span", { className: "x last", style: { left: "100%" }, textContent: String(lastStep) }));
  }
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  if (smoothing > 0) svg.append(drawPath(toPoints(values), "raw"));
  svg.append(drawPath(toPoints(smoothing > 0 ? smooth(values, smoothing) : values), "curve"));
  plot.append(svg);
  if (shown.length <= 12)
    for (const index of shown) plot.append(makeDot(toX(steps[index]), toY(values[index]), "dot"));
  for (const index of known.filter((each) => !Number.isFinite(values[each]))) {
    // NaN: a red mark on the axis
    plot.append(makeDot(toX(steps[index]), 100, "dot odd"));
  }
  for (const mark of marks) {
    if (mark.step < firstStep || mark.step > lastStep) continue;
    const element = make("div", { className: `mark ${mark.className}`, style: { left: `${toX(mark.step)}%` } });
    plot.append(setTip(element, () => mark.text));
  }

  const last = make("span", { className: "current" });
  const title = make("span", { className: "title" }, ...makeBreakable(name));
  const card = make("article", { className: "card chart", dataset: { name } }, make("header", {}, title, last), plot);
  addCursor(card, plot, last, { name, steps, values, known, toX, toY });
  return card;
}

const makeDot = (x, y, className) => make("div", { className, style: { left: `${x}%`, top: `${y}%` } });

// Let the pointer select a step in all charts; the card's corner shows the value there, otherwise the last one.
function addCursor(card, plot, last, { steps, values, known, toX, toY }) {
  const line = make("div", { className: "cursor", hidden: true }),
    dot = make("div", { className: "dot", hidden: true });
  plot.append(line, dot);
  const chart = {
    card,
    showStep(step) {
      const index = step === null ? -1 : findNearest(known, steps, step);
      line.hidden = dot.hidden = index < 0;
      if (index < 0) {
        const end = known[known.length - 1];
        last.textContent = end === undefined ? "–" : formatNumber(values[end]);
        return;
      }
      line.style.left = dot.style.left = `${toX(steps[index])}%`;
      dot.hidden = !Number.isFinite(values[index]);
      dot.style.top = `${toY(values[index])}%`;
      last.textContent = `step ${steps[index]}: ${formatNumber(values[index])}`;
    },
  };
  chart.showStep(null);
  charts.add(chart);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(),
      share = (event.clientX - box.left) / box.width;
    showStepEverywhere(steps[0] + share * (steps[steps.length - 1] - steps[0]));
  });
  plot.addEventListener("pointerleave", () => showStepEverywhere(null));
}

function showStepEverywhere(step) {
  for (const chart of charts) {
    if (chart.card.isConnected) chart.showStep(step);
    else charts.delete(chart);
  }
}

// Return the one of the ascending indices `known` whose step is nearest, -1 if there is none.
function findNearest(known, steps, step) {
  let low = 0,
    high = known.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[known[middle]] < step) low = middle;
    else high = middle;
  }
  if (high < 0) return -1;
  return Math.abs(steps[known[low]] - step) <= Math.abs(steps[known[high]] - step) ? known[low] : known[high];
}
