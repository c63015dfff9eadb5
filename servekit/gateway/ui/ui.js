// The pages' own script, beside Gradio's: language, theme, copying, saving, tokens. Its listeners are
// on the document, since Gradio adds and removes elements. Text from a model is only ever set as
// text, never as HTML.
(() => {
  // A browser may forbid its storages, or have no room: what is kept there lasts as long as the page then.
  for (const name of ["localStorage", "sessionStorage"]) {
    const kept = new Map();
    try {
      for (const key of Object.keys(window[name])) kept.set(key, window[name].getItem(key));
      window[name].setItem("servekit.probe", "");
      window[name].removeItem("servekit.probe");
    } catch {
      const value = {
        getItem: (key) => kept.get(key) ?? null,
        setItem: (key, text) => void kept.set(key, String(text)),
        removeItem: (key) => void kept.delete(key),
      };
      Object.defineProperty(window, name, { value });
    }
  }
  const onBody = (act) => (document.body ? act() : document.addEventListener("DOMContentLoaded", act));
  const dark = (on) => document.body.classList.toggle("dark", on);
  const chosen = () => localStorage.getItem("servekit.theme");
  let wasDark = false; // before it was printed: paper is white
  window.addEventListener("beforeprint", () => {
    wasDark = document.body.classList.contains("dark");
    dark(false);
  });
  window.addEventListener("afterprint", () => dark(wasDark));
  /** Fade the ends of the bar behind which there are more pages. */
  const hintAtMore = (nav) => {
    const left = nav.scrollWidth - nav.clientWidth - nav.scrollLeft;
    nav.classList.toggle("sk-more-before", nav.scrollLeft > 4);
    nav.classList.toggle("sk-more-after", left > 4);
  };
  onBody(() => {
    let begun = false;
    new MutationObserver(() => {
      // Gradio gives its examples the role of a list, without list items
      document.querySelector("#sk-chat .examples[role=list]")?.setAttribute("role", "group");
      const bar = document.querySelector(".sk-bar");
      if (!bar || begun) return;
      begun = true;
      document.documentElement.lang = bar.dataset.langNow;
      const page = bar.querySelector("[aria-current]");
      if (page) document.title = `${page.textContent} · servekit`;
      const nav = bar.querySelector("nav"); // wider than the screen of a phone
      if (page) nav.scrollLeft = page.offsetLeft - nav.offsetLeft - (nav.clientWidth - page.offsetWidth) / 2;
      hintAtMore(nav);
      nav.addEventListener("scroll", () => hintAtMore(nav));
      window.addEventListener("resize", () => hintAtMore(nav));
      if (chosen()) dark(chosen() === "dark");
      offerSignOut(bar);
    }).observe(document.body, { childList: true, subtree: true });
  });

  // ---- what is written in a tab's fields: for its next page of that kind, in whatever language
  const page = location.pathname.replace(/^\/ui(\/zh)?\/?/, "");
  const WRITTEN = `servekit.written.${page}`; // in sessionStorage
  const written = new Set(); // ids of fields
  const textOf = (id) => document.querySelector(`#${id} textarea`);
  document.addEventListener("input", ({ target }) => {
    const id = target.matches?.("textarea") && target.closest("[id]")?.id;
    if (id && id !== "sk-chat") written.add(id); // there it is a question that is edited
  });
  const before = new Map(JSON.parse(sessionStorage.getItem(WRITTEN) ?? "[]")); // not in its field yet
  sessionStorage.removeItem(WRITTEN); // a copy of the tab begins anew
  window.addEventListener("pagehide", () => {
    const texts = [...written].map((id) => [id, textOf(id)?.value]).filter(([, text]) => text);
    sessionStorage.setItem(WRITTEN, JSON.stringify([...before, ...texts]));
  });
  const write = (id, text) => {
    if (!before.delete(id) || written.has(id)) return;
    textOf(id).value = text;
    textOf(id).dispatchEvent(new Event("input", { bubbles: true }));
  };
  const onIdle = window.requestIdleCallback ?? setTimeout; // Gradio listens to the field by then
  const looksForFields = new MutationObserver(() => {
    if (!before.size) looksForFields.disconnect();
    for (const [id, text] of before) { // it may be in a tab that is not shown
      if (textOf(id)) onIdle(() => write(id, text), { timeout: 2000 });
    }
  });
  looksForFields.observe(document.documentElement, { childList: true, subtree: true });

  // ---- files
  /** Call `act` with files that are dropped while `accepts`; `mark` shows whether they are above. */
  window.servekitOnDrop = (accepts, mark, act) => {
    const holdsFiles = (event) => accepts() && event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault(); // else the browser leaves the page for the file
      mark(true);
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) mark(false);
    });
    document.addEventListener("drop", (event) => {
      mark(false);
      if (!holdsFiles(event)) return;
      event.preventDefault();
      act([...event.dataTransfer.files]);
    });
  };

  // ---- the signed-in key; an expired session redirects to the form, which leads back here
  const ask = window.fetch.bind(window);
  /** Replace halves of characters, which other programs cut: they are escaped, and no text has them. */
  const mend = (json) => json.replace(/\\(?:u(d[89a-f]..)|.)/g, (all, half) => (half ? "\ufffd" : all));
  let leaving = false; // once: each further response would restart the navigation
  window.fetch = async (what, more, ...rest) => {
    const halves = typeof more?.body === "string" && /\\ud[89a-f]/.test(more.body);
    const answer = await ask(what, halves ? { ...more, body: mend(more.body) } : more, ...rest);
    if (!leaving && answer.status === 401 && new URL(answer.url).origin === location.origin) {
      leaving = true;
      location = `/ui/login?to=${page}`;
    }
    return answer;
  };
  const offerSignOut = async (bar) => {
    const { key } = await (await ask("/ui/session")).json();
    const button = bar.querySelector(".sk-out");
    button.title = `${button.dataset.signOut} (${key})`;
    button.setAttribute("aria-label", button.title);
    button.hidden = key === null;
  };

  window.servekitDownload = (text, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };
  const acts = {
    ".sk-theme": () => {
      dark(!document.body.classList.contains("dark"));
      localStorage.setItem("servekit.theme", document.body.classList.contains("dark") ? "dark" : "light");
    },
    "[data-lang]": (link) => {
      document.cookie = `servekit-lang=${link.dataset.lang}; path=/ui; max-age=31536000; samesite=lax`;
    },
    ".sk-copy": async (button) => {
      const code = button.closest(".sk-code").querySelector("pre");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch { // no clipboard API over plain HTTP from another host
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      const before = button.textContent;
      button.textContent = button.dataset.done;
      setTimeout(() => (button.textContent = before), 1500);
    },
    ".sk-save": (button) => servekitDownload(button.nextElementSibling.value, button.dataset.name),
    ".sk-retry": () => document.querySelector("#sk-again").click(),
    ".sk-tokens .sk-token": (token) => token.focus(),
    ".sk-out": async () => {
      await ask("/ui/logout", { method: "POST", redirect: "manual" });
      location = "/ui/login";
    },
  };
  document.addEventListener("click", (event) => {
    for (const [selector, act] of Object.entries(acts)) {
      const found = event.target.closest?.(selector);
      if (found) act(found);
    }
  });

  // ---- tokens: hover or focus shows the alternatives
  const row = (cells, tag) => {
    const line = document.createElement("tr");
    for (const cell of cells) {
      const made = document.createElement(tag);
      made.append(cell);
      line.append(made);
    }
    return line;
  };
  const meter = (share) => {
    const bar = document.createElement("span");
    bar.className = "sk-meter";
    bar.style.setProperty("--sk-share", `${100 * share}%`);
    return bar;
  };
  const explain = (token) => {
    const detail = token.closest(".sk-card")?.querySelector(".sk-detail");
    if (!detail) return;
    const table = document.createElement("table");
    table.append(row([detail.dataset.token, detail.dataset.chance, ""], "th"));
    for (const [text, percent, share, isChosen] of JSON.parse(token.dataset.rows)) {
      const name = document.createElement("code");
      name.textContent = text;
      const said = document.createElement("span");
      said.append(name, isChosen ? ` (${detail.dataset.chosen})` : "");
      table.append(row([said, percent, meter(share)], "td"));
    }
    detail.replaceChildren(table);
  };
  const tokenOf = (event) => event.target.closest?.(".sk-tokens .sk-token");
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => tokenOf(event) && explain(tokenOf(event)));
  }
  const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 };
  document.addEventListener("keydown", (event) => {
    const token = tokenOf(event);
    if (!token || !(event.key in STEPS)) return;
    event.preventDefault();
    const all = [...token.parentElement.querySelectorAll(".sk-token")];
    const to = Math.max(0, Math.min(all.length - 1, all.indexOf(token) + STEPS[event.key]));
    token.tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  });
})();
