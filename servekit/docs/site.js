// Search over all pages, the list of pages on a phone, and the theme that was chosen in the UI.
const own = document.currentScript.dataset;
const root = document.documentElement;
root.classList.add("has-script");
try {
  const theme = localStorage.getItem("servekit.theme");
  if (theme) root.dataset.theme = theme;
} catch { /* a browser that keeps nothing */ }

const MOST = 40;
let sections = null; // [page, title, anchor, heading, text] of each section
let loading = null;

function load() {
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = own.search;
    script.onload = () => { sections = window.servekitSearch; done(); };
    script.onerror = () => { loading = null; failed(); };
    document.head.append(script);
  });
  return loading;
}

function score(section, words) {
  const [page, title, , heading, text] = section.map((one) => one.toLowerCase());
  let sum = 0;
  for (const word of words) {
    let best = 0;
    if (heading === word || page === word) best = 30;
    else if (heading.includes(word)) best = 12;
    else if (title.includes(word)) best = 6;
    const times = Math.min(text.split(word).length - 1, 5);
    if (!best && !times) return 0;
    sum += best + times;
  }
  return sum;
}

// The text around the first word, with all words marked.
function excerpt(text, words) {
  const small = text.toLowerCase();
  const places = words.map((word) => small.indexOf(word)).filter((at) => at >= 0);
  const from = Math.max(0, Math.min(...places, text.length) - 60);
  const part = text.slice(from, from + 220);
  const told = document.createElement("p");
  let at = 0;
  const low = part.toLowerCase();
  if (from) told.append("… ");
  while (at < part.length) {
    const next = words.map((word) => [low.indexOf(word, at), word]).filter(([found]) => found >= 0)
      .sort((one, other) => one[0] - other[0])[0];
    if (!next) break;
    told.append(part.slice(at, next[0]));
    const mark = document.createElement("mark");
    mark.textContent = part.slice(next[0], next[0] + next[1].length);
    told.append(mark);
    at = next[0] + next[1].length;
  }
  told.append(part.slice(at), text.length > from + 220 ? " …" : "");
  return told;
}

function show(box, results, article) {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  results.hidden = !words.length;
  article.hidden = Boolean(words.length);
  if (!words.length) return;
  const found = sections.map((section) => [score(section, words), section])
    .filter(([points]) => points > 0).sort((one, other) => other[0] - one[0]);
  const title = document.createElement("h2");
  title.textContent = found.length === 1 ? "1 section" : `${found.length} sections`;
  const list = document.createElement("ol");
  for (const [, [page, name, anchor, heading, text]] of found.slice(0, MOST)) {
    const link = document.createElement("a");
    link.href = `${own.page.replace("NAME", page)}#${anchor}`;
    const head = document.createElement("b");
    head.textContent = heading;
    const where = document.createElement("small");
    where.textContent = ` ${name}`;
    link.append(head, where, excerpt(text, words));
    const item = document.createElement("li");
    item.append(link);
    list.append(item);
  }
  results.replaceChildren(title, list);
}

addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("search");
  const results = document.getElementById("results");
  const article = document.querySelector("article");
  const pages = document.getElementById("pages");
  const menu = document.getElementById("menu");
  const current = pages.querySelector("[aria-current]");
  if (current) pages.scrollTop = current.offsetTop - pages.clientHeight / 2;
  menu.addEventListener("click", () => {
    menu.setAttribute("aria-expanded", String(pages.classList.toggle("open")));
  });
  const search = () => load().then(() => show(box, results, article), () => {
    results.hidden = false;
    results.textContent = "The search could not be loaded.";
  });
  box.addEventListener("focus", () => load().catch(() => {}));
  box.addEventListener("input", search);
  box.addEventListener("keydown", (event) => {
    const first = results.querySelector("a");
    if (event.key === "Enter" && first && !results.hidden) first.click();
    if (event.key === "ArrowDown" && first) { event.preventDefault(); first.focus(); }
    if (event.key === "Escape") { box.value = ""; search(); }
  });
  // A link to a section of this page shows it; one for another tab leaves the results.
  const follow = ({ target, ctrlKey, metaKey, shiftKey }) => {
    if (!target.closest("a") || ctrlKey || metaKey || shiftKey) return;
    box.value = "";
    results.hidden = true;
    article.hidden = false;
  };
  for (const list of [results, pages]) list.addEventListener("click", follow);
  addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, textarea, select");
    if (event.key === "/" && !typing) { event.preventDefault(); box.focus(); }
  });
  if (box.value) search(); // a browser that goes back keeps what was typed
});
