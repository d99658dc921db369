// Elements, numbers and the tooltip. Text of the run is only ever set as text, never parsed as HTML.

const byId = (id) => document.getElementById(id);

// Create an element. Properties are set as such, `dataset` and `style` by their entries; children are nodes or text.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style" || name === "dataset") Object.assign(element[name], value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function formatDuration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const formatTime = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "unknown");
const formatCount = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;

// Return the nodes of a name that lines may break at its separators.
const makeBreakable = (name) => name.split(/(?<=[_/.@])/).flatMap((part, index) => (index ? [make("wbr"), part] : [part]));

// Show a text while the pointer is over an element; `describe` is called with the event.
const tips = new WeakMap();
const setTip = (element, describe) => {
  tips.set(element, describe);
  return element;
};

function findTip(target) {
  for (let element = target; element instanceof Element; element = element.parentElement) {
    if (tips.has(element)) return tips.get(element);
  }
  return null;
}

function showTip(event) {
  const tip = byId("tip"),
    describe = findTip(event.target);
  if (!describe) {
    tip.hidden = true;
    return;
  }
  const host = document.querySelector("dialog[open]") || document.body; // above an open dialog
  if (tip.parentElement !== host) host.append(tip);
  tip.textContent = describe(event);
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
}

document.addEventListener("pointermove", showTip);
document.addEventListener("pointerdown", showTip);
document.addEventListener(
  "scroll",
  () => {
    byId("tip").hidden = true;
  },
  true,
);

function debounce(action, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

// Say in the page that a part of it failed, e.g. in a browser that is too old.
function showProblem(reason) {
  byId("problem").textContent = `This page could not be shown completely: ${reason}`;
  byId("problem").hidden = false;
}

addEventListener("error", (event) => showProblem(event.message));
addEventListener("unhandledrejection", (event) => showProblem(event.reason));
