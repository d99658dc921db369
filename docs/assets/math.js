// Render the formulas of a page. KaTeX is loaded only by pages that have some, at one version with a known checksum.
const KATEX = "https://cdn.jsdelivr.net/npm/katex@0.16.47/dist/katex.min";
const CHECKSUMS = {
  css: "sha384-nH0MfJ44wi1dd7w6jinlyBgljjS8EJAh2JBoRad8a3VDw2K69vfaaqm4WnR+gXtA",
  js: "sha384-CwjPRVHTvLiMBFjEoij+QZViMV5rhTOIp7CJzl24JEqpRDA1sJFHVXXLURktbYYp",
};

document.addEventListener("DOMContentLoaded", () => {
  const formulas = document.querySelectorAll(".formula");
  if (!formulas.length) return;
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: `${KATEX}.css` });
  const script = Object.assign(document.createElement("script"), { src: `${KATEX}.js` });
  for (const [element, checksum] of [[style, CHECKSUMS.css], [script, CHECKSUMS.js]]) {
    Object.assign(element, { integrity: checksum, crossOrigin: "anonymous" });
    document.head.append(element);
  }
  script.onload = () => {
    for (const formula of formulas) katex.render(formula.textContent, formula, { displayMode: true, throwOnError: false });
  };
});
