// The conversations of the chat. This browser keeps them, and a tab shows one of them: their list, and
// what is saved of the one that is shown. Several tabs may be open: each save of a conversation has a
// number, and a tab that has not seen the last one saves beside it. `start`, `take`, `begin`, `keep`,
// `pack`, `undo` and `end` are called by events of chat_page.py, with conversations as JSON. What comes
// back has the number of its event: on a slow line, an answer that was left may come after the
// conversation that was opened then. A Stop has the number of its question (`getAsked`), for it may come
// after the next question.
(() => {
  const { settle, run, readDataUri, makeId } = servekitStore;
  const HERE = "servekit.conversation"; // in sessionStorage: the one of this tab
  const SHOWN_WITHIN_MS = 5000; // a server that is gone shows nothing
  const SAVED_WITHIN_MS = 1000; // until then the field shows that the answer is not kept yet
  const listed = new Map(); // id to { id, title, at }
  const numbers = new Map(); // id to the number of the last save that this tab has seen
  const beside = new Map(); // id to the id that this tab saves it under
  const deleted = new Set(); // ids
  const makeNew = () => ({ id: makeId(), turns: [] });
  let current = makeNew();
  let found = null; // ids that the search has found; null without a search
  let drawn = "";

  const find = (selector) => document.querySelector(selector);
  const root = () => find("#sk-kept .sk-kept");
  const dialog = () => root().querySelector("dialog");
  const say = (key, values = {}) =>
    JSON.parse(root().dataset.texts)[key].replace(/\{(\w+)\}/g, (_, field) => values[field]);
  const complain = (sentence) => (find("#sk-store [role=alert]").textContent = sentence);
  const pickIds = (turns) => turns.flatMap((turn) => turn.images ?? []).map(({ id }) => id);

  // ---- the store
  const get = (id) => run((all) => settle(all.get(id))).catch(() => undefined);
  const getAll = () => run((all) => settle(all.getAll())).catch(() => []);
  /** Remove the images that no conversation has. */
  const sweep = async (all, images) => {
    const used = new Set((await settle(all.getAll())).flatMap(({ turns }) => pickIds(turns)));
    for (const id of await settle(images.getAllKeys())) if (!used.has(id)) images.delete(id);
  };
  /** Save a conversation; return whether the store has it. */
  const save = async (id, turns) => {
    try {
      const done = await run(async (all, images) => {
        const there = await settle(all.get(id));
        if (JSON.stringify(there?.turns ?? []) === JSON.stringify(turns)) {
          numbers.set(id, there?.number ?? 0);
          return null;
        }
        const forks = there && there.number !== (numbers.get(id) ?? 0);
        const number = forks ? 1 : (there?.number ?? 0) + 1;
        const title = there?.title ?? "";
        const made = { id: forks ? makeId() : id, title, turns, number, at: Date.now() };
        if (turns.length) all.put(made);
        else if (!forks) all.delete(id);
        const wanted = new Set(pickIds(turns));
        if (pickIds(there?.turns ?? []).some((image) => !wanted.has(image))) await sweep(all, images);
        return made;
      }, "readwrite");
      if (done) note(done, id);
      return true;
    } catch (error) {
      complain(say(error?.name === "QuotaExceededError" ? "full" : "unkept"));
      return false;
    }
  };
  const note = (made, id) => {
    numbers.set(made.id, made.turns.length ? made.number : 0);
    if (made.id === id) {
      // else nobody could read it: the answer is saved right after the question
      if (find("#sk-store [role=alert]").textContent !== say("fork")) complain("");
    } else {
      beside.set(id, made.id);
      if (current.id === id) remember({ ...current, id: made.id });
      complain(say("fork"));
    }
    list(made);
    searchAgain();
    channel.postMessage(made.id);
  };
  const list = ({ id, title, turns, at }) => {
    const asked = turns.find(({ role }) => role === "user")?.content ?? "";
    const words = title || asked.trim().replace(/\s+/g, " ").slice(0, 100) || say("image");
    if (turns.length) listed.set(id, { id, title: words, at });
    else listed.delete(id);
  };
  const remember = (conversation) => {
    current = conversation;
    sessionStorage.setItem(HERE, current.id);
  };

  // ---- other tabs
  const channel = new BroadcastChannel("servekit.conversations");
  channel.onmessage = async ({ data: id }) => {
    const there = await get(id);
    if (there) {
      list(there);
      deleted.delete(id);
    } else {
      listed.delete(id);
      deleted.add(id); // an answer that is still coming here does not bring it back
    }
    const isNews = (there?.number ?? 0) !== (numbers.get(id) ?? 0);
    if (id === current.id && isNews) {
      if (asking) missed = id;
      else show(there ?? makeNew());
    }
    searchAgain();
  };

  // ---- what is shown
  const show = (conversation) => {
    complain("");
    beside.delete(conversation.id);
    numbers.set(conversation.id, conversation.number ?? 0);
    remember({ id: conversation.id, turns: conversation.turns });
    draw();
    showAgain();
  };
  let event = 0; // the number of the last one
  const due = new Set(["start"]); // what the server has not shown yet: by event, if it has one
  const waiting = []; // to be called when nothing is due
  let asking = 0; // questions that the server has not ended yet
  let lastAsked = 0; // the number of the last one
  let stale = false; // whether the page shows what was left
  let missed = null; // the id of what has news of another tab
  const showAgain = () => {
    due.add("press");
    find("#sk-show").click();
  };
  const take = () => {
    due.delete("start");
    due.delete("press");
    due.add(++event);
    return JSON.stringify({ ...current, event, isShown: true });
  };
  const begin = () => {
    remember(makeNew());
    complain("");
    draw();
    find("#sk-box textarea").focus();
    return take();
  };
  const start = async () => {
    for (const one of await getAll()) list(one);
    await run(sweep, "readwrite").catch(() => {});
    const there = await get(sessionStorage.getItem(HERE) ?? "");
    if (there) numbers.set(there.id, there.number);
    remember(there ? { id: there.id, turns: there.turns } : makeNew());
    draw();
    return take();
  };
  let last = Promise.resolve(); // one save at a time
  let before = "";
  const keep = (kept) => {
    if (kept === before) return;
    before = kept;
    const { id: given, turns, event: at, isShown } = JSON.parse(kept || "{}");
    due.delete(at);
    if (!due.size) waiting.splice(0).forEach((go) => go());
    if (at === asked?.at) {
      const { text } = asked;
      asked = null;
      setTimeout(() => writeOn(text), 0); // by then the field is cleared
    }
    if (!given || deleted.has(given)) return;
    stale = at !== event;
    if (!isShown) keepTurns(given, turns);
    else if (!stale) servekitImages.keep(turns, true); // from the store, which may have a later one by now
    catchUp();
  };
  const keepTurns = (given, turns) => {
    const idNow = () => beside.get(given) ?? given; // a save before this one may change it
    const isCurrent = idNow() === current.id;
    if (stale && isCurrent) return; // it was opened again since
    const saving = last.then(() => save(idNow(), turns));
    last = saving;
    if (isCurrent) {
      current.turns = turns;
      servekitImages.keep(turns, saving);
    }
  };
  /** Show what is current unless an answer is coming, which shows it; the server would drop that. */
  const catchUp = () => {
    if (asking) return;
    if (stale) showAgain();
    const id = missed;
    if (id) last.then(() => channel.onmessage({ data: id })); // by then the answer may have forked
    stale = false;
    missed = null;
  };
  let asked = null; // the last question: { text, at }, with the number of its event
  let typed = ""; // what the field has had since
  /** Put back what was typed after a question: it leaves its field when the server has it. */
  const writeOn = (text) => {
    if (asked || typed === text) return; // the next one is on its way, or nothing was typed
    const box = find("#sk-box textarea");
    box.value = typed.startsWith(text) ? typed.slice(text.length) : typed;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const pack = async (withPicked, text) => {
    asking += 1;
    typed = text ?? "";
    if (due.size) {
      // else the server would drop the answer when it shows the conversation later
      await new Promise((resolve) => {
        waiting.push(resolve);
        setTimeout(resolve, SHOWN_WITHIN_MS);
      });
      due.clear();
    }
    const [{ id, turns }, at] = [current, ++event]; // it may be left while the files are read
    lastAsked = at;
    asked = withPicked ? { text: text ?? "", at } : null; // only that one is in the field
    return JSON.stringify({ id, event: at, ...(await servekitImages.pack(turns, withPicked)) });
  };
  const end = async (kept) => {
    keep(kept); // its change may be told later
    asking -= 1;
    catchUp();
    await Promise.race([last, new Promise((resolve) => setTimeout(resolve, SAVED_WITHIN_MS))]);
    // not with the last words: Gradio drops what is sent before it has closed the event
    return { __type__: "update", ...(asking ? {} : { submit_btn: true, stop_btn: false }) };
  };
  const undo = () => {
    servekitImages.undo(current.turns);
    due.add(++event);
    return JSON.stringify({ ...current, event });
  };
  const getAsked = () => String(lastAsked);
  window.servekitChats = { start, take, begin, keep, pack, undo, end, getAsked };

  // ---- the list
  const draw = () => {
    if (!root()) return;
    const shown = [...listed.values()].sort((a, b) => b.at - a.at)
      .filter(({ id }) => found === null || found.has(id));
    const now = JSON.stringify([current.id, shown.map(({ id, title }) => [id, title])]);
    root().querySelector("p[role=status]").textContent =
      shown.length ? "" : say(found === null ? "none" : "none_fits");
    if (now === drawn) return;
    drawn = now;
    const focused = root().querySelector("ul button:focus");
    root().querySelector("ul").replaceChildren(...shown.map(({ id, title, at }) => {
      const item = document.createElement("li");
      const opens = makeButton("sk-open", title);
      opens.dir = "auto";
      opens.title = `${title} · ${new Date(at).toLocaleString(root().lang)}`;
      if (id === current.id) opens.setAttribute("aria-current", "true");
      const more = makeButton("sk-more", "⋯");
      more.setAttribute("aria-label", say("more", { title }));
      item.dataset.id = id;
      item.append(opens, more);
      return item;
    }));
    if (focused) find(`#sk-kept li[data-id="${focused.parentNode.dataset.id}"] .${focused.className}`)?.focus();
  };
  const makeButton = (kind, words) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = kind;
    button.textContent = words;
    return button;
  };
  const search = async (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const has = ({ title, turns }) => {
      const all = [title, ...turns.map(({ content }) => content)].join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    };
    found = words.length ? new Set((await getAll()).filter(has).map(({ id }) => id)) : null;
    draw();
  };

  const searchAgain = () => search(root().querySelector("input[type=search]").value);

  // ---- the dialog
  const ask = (id) => {
    const { title } = listed.get(id);
    dialog().dataset.id = id;
    dialog().querySelector("input").value = title;
    dialog().querySelector(".sk-sure p").textContent = say("sure", { title });
    isSure(false);
    dialog().showModal();
  };
  const isSure = (asked) => {
    dialog().querySelector(".sk-choices").hidden = asked;
    dialog().querySelector(".sk-sure").hidden = !asked;
    dialog().querySelector(asked ? "[data-act=cancel]" : "input").focus();
  };
  const changeOne = async (act) => {
    const { id } = dialog().dataset;
    await run(act(id), "readwrite").catch(() => complain(say("unkept")));
    channel.postMessage(id);
  };
  const rename = async () => {
    const title = dialog().querySelector("input").value.trim();
    await changeOne((id) => async (all) => {
      const there = await settle(all.get(id));
      if (!there) return;
      all.put({ ...there, title });
      list({ ...there, title });
    });
    await searchAgain();
    dialog().close();
    find(`#sk-kept li[data-id="${dialog().dataset.id}"] .sk-more`)?.focus();
  };
  const remove = async () => {
    const { id } = dialog().dataset;
    deleted.add(id);
    await changeOne(() => async (all, images) => {
      await settle(all.delete(id));
      await sweep(all, images);
    });
    listed.delete(id);
    dialog().close();
    if (id === current.id) show(makeNew());
    draw();
    root().querySelector("input").focus(); // the button that had it is gone
  };
  const acts = {
    rename,
    markdown: async () => exportOne("md", writeMarkdown),
    json: async () => exportOne("json", writeJson),
    delete: () => isSure(true),
    delete_it: remove,
    cancel: () => isSure(false),
    close: () => dialog().close(),
  };

  // ---- exports
  const exportOne = async (ending, write) => {
    const there = await get(dialog().dataset.id);
    if (!there) return;
    const { title } = listed.get(there.id);
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "");
    servekitDownload(await write(title, there), `${name || "conversation"}.${ending}`);
    dialog().close();
  };
  /** Return an answer's thoughts and its text. */
  const divide = ({ role, content }) => {
    const [begins, ends] = JSON.parse(root().dataset.thoughts);
    if (role !== "assistant" || !content.startsWith(begins)) return ["", content];
    const [thoughts, ...rest] = content.slice(begins.length).split(ends);
    return [thoughts, rest.join(ends)];
  };
  /** Return text as a block of code, whatever backticks it has. */
  const fence = (text) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
    const ticks = "`".repeat(longest + 1);
    return `${ticks}\n${text}\n${ticks}`;
  };
  const writeMarkdown = (title, { turns }) => {
    const parts = turns.map((turn) => {
      const [thoughts, text] = divide(turn);
      const quoted = thoughts.trim() && thoughts.trim().replace(/^/gm, "> ");
      const images = (turn.images ?? []).map(({ name }) => `*[${name}]*`).join(" ");
      const head = `## ${say(turn.role === "user" ? "you" : "model")}`;
      const calls = (turn.calls ?? []).flatMap(({ tool, server, arguments: given, result }) =>
        [`**${say("call", { tool, server })}**`, fence(given), result !== undefined && fence(result)]);
      return [head, quoted, images, text.trim(), ...calls].filter(Boolean).join("\n\n");
    });
    return [`# ${title}`, ...parts].join("\n\n") + "\n";
  };
  /** Return what the API takes as `messages`, with images as `data:` URIs. */
  const writeJson = async (title, { turns, at }) => {
    const messages = [];
    for (const turn of turns) {
      const [thoughts, text] = divide(turn);
      const images = [];
      for (const { id } of turn.images ?? []) {
        const blob = await run((_, all) => settle(all.get(id))).catch(() => undefined);
        if (blob) images.push({ type: "image_url", image_url: { url: await readDataUri(blob) } });
      }
      const content = images.length ? [...images, { type: "text", text }] : text;
      const more = thoughts ? { reasoning_content: thoughts } : {};
      const calls = turn.calls ?? [];
      if (calls.length) {
        more.tool_calls = calls.map(({ id, name, arguments: given }) =>
          ({ id, type: "function", function: { name, arguments: given } }));
      }
      messages.push({ role: turn.role, content, ...more });
      for (const { id, result } of calls) {
        messages.push({ role: "tool", tool_call_id: id, content: result ?? say("not_made") });
      }
    }
    return JSON.stringify({ title, saved: new Date(at).toISOString(), messages }, null, 2) + "\n";
  };

  // ---- events
  const isOpen = () => find("#sk-body")?.hasAttribute("data-drawn"); // Gradio's CSS cannot see <body>
  const openDrawer = (open) => {
    find("#sk-body").toggleAttribute("data-drawn", open);
    find(".sk-drawer-button").setAttribute("aria-expanded", String(open));
    if (open) root().querySelector("input").focus();
  };
  document.addEventListener("click", async ({ target }) => {
    const inside = target.closest?.("#sk-kept");
    if (target.closest?.(".sk-drawer-button")) openDrawer(!isOpen());
    else if (isOpen() && (!inside || target.closest(".sk-open"))) openDrawer(false);
    if (!inside) return;
    const id = target.closest("li")?.dataset.id;
    if (target.closest(".sk-more")) ask(id);
    acts[target.dataset.act]?.();
    if (target.closest(".sk-open")) {
      const there = await get(id);
      if (there) show(there);
      find("#sk-box textarea").focus();
    }
  });
  document.addEventListener("input", ({ target }) => {
    if (target.matches?.(".sk-kept input[type=search]")) search(target.value);
    if (target.matches?.("#sk-box textarea")) typed = target.value;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing && event.target.matches?.(".sk-edit input")) rename();
    if (event.key !== "Escape" || !isOpen() || dialog().open) return;
    event.stopImmediatePropagation(); // chat.js would stop the answer
    openDrawer(false);
    find(".sk-drawer-button").focus();
  });
})();
