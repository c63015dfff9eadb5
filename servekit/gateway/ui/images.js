// Images of the chat: picked by a button, dropped or pasted, checked, shown, and kept in this browser
// as long as its conversation is. A conversation names its images by id; their files are sent with
// each question. `keep`, `pack` and `undo` are called by conversations.js.
(() => {
  const { settle, run, readDataUri, makeId } = servekitStore;
  // The first bytes of a file, as in servekit/gateway/api/images.py.
  const KINDS = {
    "image/png": /^\x89PNG\r\n\x1a\n/,
    "image/jpeg": /^\xff\xd8\xff/,
    "image/gif": /^GIF8[79]a/,
    "image/webp": /^RIFF[^]{4}WEBP/,
  };
  const MOST_KEPT_BYTES = 32 * 2 ** 20;
  const files = new Map(); // of the conversation and the next message: id to { blob, url }
  let picked = []; // of the next message: { id, name }
  let sent = []; // of the conversation
  let undone = []; // of a message that is being taken back
  const unkept = new Set(); // ids that were told to be too large

  const find = (selector) => document.querySelector(selector);
  const root = () => find("#sk-images .sk-images");
  const sight = () => find("#sk-sight .sk-sight").dataset;
  const say = (key, values = {}) =>
    JSON.parse(root().dataset.texts)[key].replace(/\{(\w+)\}/g, (_, field) => values[field]);
  const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
  const complain = (sentence) => (root().querySelector("[role=alert]").textContent = sentence);
  const announce = (sentence) => (root().querySelector("[role=status]").textContent = sentence);
  const imagesOf = (turns) => (turns ?? []).flatMap((turn) => turn.images ?? []);

  // ---- adding
  let adding = Promise.resolve();
  const add = (given) => (adding = Promise.allSettled([adding, addAll(given)]));
  const addAll = async (given) => {
    const found = [sight().blind];
    for (const file of sight().blind ? [] : given) found.push(await addOne(file));
    complain([...new Set(found)].join(" ").trim());
    draw();
  };
  const addOne = async (file) => {
    const { name } = file;
    const { mostBytes, mostPixels } = root().dataset;
    const sizes = { name, size: megabytes(file.size), most: megabytes(mostBytes) };
    if (file.size > mostBytes) return say("large", sizes);
    let data;
    try {
      data = await file.arrayBuffer(); // a copy: the file may change before it is sent
    } catch { // a folder
      return say("kind", { name });
    }
    const head = String.fromCharCode(...new Uint8Array(data.slice(0, 12)));
    const kind = Object.keys(KINDS).find((one) => KINDS[one].test(head));
    if (!kind) return say("kind", { name });
    const blob = new Blob([data], { type: kind });
    const url = URL.createObjectURL(blob);
    const wrong = await judge(url, name, mostPixels);
    const all = [...sent, ...picked];
    const used = all.reduce((sum, { id }) => sum + (files.get(id)?.blob.size ?? 0), 0);
    const problem =
      wrong ||
      // before the page knows the limit, the server checks it
      (all.length >= sight().most && say("many", { most: sight().most })) ||
      (used + file.size > mostBytes && say("large", sizes));
    if (problem) {
      URL.revokeObjectURL(url);
      return problem;
    }
    const id = makeId();
    files.set(id, { blob, url });
    picked.push({ id, name });
    announce(say("added", { name }));
    return "";
  };
  const judge = async (url, name, mostPixels) => {
    const image = new Image();
    try {
      image.src = url;
      await settle(image, "onload"); // only the head: few bytes may stand for many pixels
      const pixels = image.naturalWidth * image.naturalHeight;
      const millions = (count) => Math.floor(count / 1e6);
      const sizes = { name, size: millions(pixels), most: millions(mostPixels) };
      if (pixels > mostPixels) return say("pixels", sizes);
      await image.decode();
      return "";
    } catch {
      return say("broken", { name });
    }
  };

  // ---- what is picked
  const draw = () => {
    root()?.querySelector(".sk-picked").replaceChildren(...picked.map(({ id, name }) => {
      const item = document.createElement("li");
      const image = new Image();
      image.src = files.get(id).url;
      image.alt = name;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "×";
      button.title = say("remove", { name });
      button.setAttribute("aria-label", button.title);
      button.addEventListener("click", () => remove(id));
      button.addEventListener("keydown", ({ key }) => /^(Delete|Backspace)$/.test(key) && remove(id));
      item.append(image, button);
      return item;
    }));
  };
  const remove = (id) => {
    const at = picked.findIndex((one) => one.id === id);
    const [{ name }] = picked.splice(at, 1);
    forget();
    draw();
    complain("");
    announce(say("removed", { name }));
    const left = root().querySelectorAll(".sk-picked button");
    (left[Math.min(at, left.length - 1)] ?? find("#sk-box textarea")).focus();
  };
  /** Free the files that are neither in the conversation nor in the next message. */
  const forget = () => {
    const wanted = new Set([...sent, ...picked, ...undone].map(({ id }) => id));
    for (const [id, { url }] of files) {
      if (wanted.has(id)) continue;
      URL.revokeObjectURL(url);
      files.delete(id);
    }
  };

  // ---- keeping: in IndexedDB, which has room for what localStorage has not
  let last = Promise.resolve(); // one at a time
  /** Keep the images of a conversation once it is saved; then those picked for it are sent. */
  const keep = (turns, saving) => {
    sent = imagesOf(turns);
    const ids = new Set(sent.map(({ id }) => id));
    const back = undone.filter(({ id }) => !ids.has(id));
    undone = [];
    picked = [...back, ...picked.filter(({ id }) => !ids.has(id))];
    last = last.then(async () => {
      if ((await saving) && ids.size > 0) await store();
      forget();
      draw();
      refresh();
    });
  };
  const store = async () => {
    let stored = [];
    try {
      stored = await run((_, images) => settle(images.getAllKeys()));
    } catch {} // no store: each image is told to be lost
    let bytes = 0;
    for (const { id, name } of sent) {
      await keepOne(id, stored.includes(id), bytes).catch(() => tell(id, name));
      bytes += files.get(id)?.blob.size ?? 0;
    }
  };
  const keepOne = async (id, isStored, bytes) => {
    const file = files.get(id);
    if (isStored && !file) {
      const blob = await run((_, images) => settle(images.get(id)));
      files.set(id, { blob, url: URL.createObjectURL(blob) });
    } else if (!isStored && file) {
      if (bytes + file.blob.size > MOST_KEPT_BYTES) throw new RangeError();
      await run((_, images) => settle(images.put(file.blob, id)), "readwrite");
    }
  };
  const tell = (id, name) => {
    if (!unkept.has(id)) complain(say("unkept", { name }));
    unkept.add(id);
  };

  // ---- sending
  const pack = async (turns, withPicked) => {
    await adding; // Enter may follow at once
    await last;
    const next = withPicked ? picked : [];
    const wanted = [...imagesOf(turns), ...next];
    const there = wanted.filter(({ id }) => files.has(id));
    complain(there.length < wanted.length ? say("lost") : "");
    const uris = await Promise.all(there.map(async ({ id }) => [id, await readDataUri(files.get(id).blob)]));
    return { turns, picked: next, files: Object.fromEntries(uris) };
  };
  /** Give the images of the last question back, which leaves the conversation. */
  const undo = (turns) => {
    undone = turns.findLast(({ role }) => role === "user")?.images ?? [];
  };
  window.servekitImages = { keep, pack, undo };

  // ---- the page: whether the model sees, and the images of the conversation
  let blind = "";
  const refresh = () => {
    for (const image of document.querySelectorAll("#sk-chat .sk-sent img[data-image]")) {
      const url = files.get(image.dataset.image)?.url;
      if (url && image.getAttribute("src") !== url) image.src = url;
    }
    if (!root() || !find("#sk-sight .sk-sight") || sight().blind === blind) return;
    if (picked.length) complain(sight().blind);
    else if (root().querySelector("[role=alert]").textContent === blind) complain("");
    blind = sight().blind;
    const button = root().querySelector(".sk-attach");
    button.setAttribute("aria-disabled", String(blind !== ""));
    button.title = blind || button.getAttribute("aria-label");
  };
  const watched = { childList: true, subtree: true, attributeFilter: ["data-image", "data-blind"] };
  new MutationObserver(refresh).observe(document.documentElement, watched);
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.(".sk-attach")) return;
    if (sight().blind) complain(sight().blind);
    else root().querySelector("input").click();
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches?.(".sk-images input")) return;
    add([...event.target.files]);
    event.target.value = ""; // else the same file cannot be chosen again
    find("#sk-box textarea").focus();
  });
  document.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    if (!root() || !files.length || types.includes("text/plain")) return; // text of an office program
    event.preventDefault();
    add([...files]);
  });
  servekitOnDrop(
    () => root(),
    (dropping) => find("#sk-body")?.toggleAttribute("data-dropping", dropping),
    add,
  );
})();
