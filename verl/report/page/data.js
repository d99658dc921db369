// The data of the page: compressed JSON in script elements that are not executed.

async function readData(name) {
  const element = byId(`data-${name}`);
  if (!element) return null;
  const bytes = decodeBase64(element.textContent);
  element.remove(); // the page keeps what it reads
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text),
    bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

const run = await readData("run");

// Texts of samples, filled in chunk by chunk after the page is drawn: {prompt, segments, facts} by position.
const texts = [];

async function readTexts(onProgress) {
  for (let number = 0; number < run.chunks; number++) {
    const chunk = await readData(`texts-${number}`);
    for (const [prompt, segments, facts] of chunk.rows)
      texts.push({ prompt: chunk.prompts[prompt], segments, facts });
    onProgress();
    await new Promise((resolve) => setTimeout(resolve));
  }
}

// Tokens of the samples of a file, read when one of its groups is first opened.
const tokensByFile = new Map();

async function readTokens(file) {
  if (!tokensByFile.has(file)) tokensByFile.set(file, readData(`tokens-${file}`));
  return (await tokensByFile.get(file)) || {};
}
