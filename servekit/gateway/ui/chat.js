// The chat page: follows an answer to its end, stops it with Esc, names Gradio's buttons, and says that
// no server answers.
(() => {
  const find = (selector) => document.querySelector(selector);

  // ---- following: the page scrolls with an answer until its reader scrolls up, and again at the end
  let following = true;
  let top = 0; // where it was scrolled to, by us or by the reader
  let height = 0; // what there was to scroll then: it may have grown since the reader came to its end
  let busy = false;
  let watched = null;
  const look = (log) => {
    const below = log.scrollHeight - log.clientHeight - log.scrollTop;
    const isPastEnd = log.scrollTop > top && log.scrollTop + log.clientHeight > height - 4;
    if (below < 4 || isPastEnd) following = true;
    else if (log.scrollTop < top) following = false;
    [top, height] = [log.scrollTop, log.scrollHeight];
  };
  const follow = () => {
    const log = find("#sk-chat [role=log]");
    if (!log) return;
    look(log); // the event of a scroll may come later
    if (!following) return;
    log.scrollTop = log.scrollHeight;
    top = log.scrollTop;
  };
  const sizes = new ResizeObserver(follow);
  document.addEventListener("scroll", ({ target }) => {
    if (target.matches?.("#sk-chat [role=log]")) look(target);
  }, true);

  // ---- Gradio's buttons
  const BUTTONS = { send: "submit-button", stop: "stop-button" };
  new MutationObserver(() => {
    const texts = find(".sk-chat-tools")?.dataset;
    if (!texts) return; // another page
    for (const [key, id] of Object.entries(BUTTONS)) {
      const button = find(`#sk-box [data-testid=${id}]`);
      if (!button || button.title) continue;
      button.title = texts[key];
      button.setAttribute("aria-label", texts[key]);
    }
    // their marks stand where their text begins
    for (const list of document.querySelectorAll("#sk-chat .md :is(ul, ol):not([dir])")) list.dir = "auto";
    // within a paragraph where the items of the list have blank lines between them
    for (const box of document.querySelectorAll("#sk-chat li input:not([aria-label])")) {
      const words = box.closest("li").textContent.trim(); // none yet while it is written
      if (words) box.setAttribute("aria-label", words);
    }
    const stop = find("#sk-box [data-testid=stop-button]");
    if (stop && !busy) following = true; // to the question that was just sent
    busy = stop !== null;
    const messages = find("#sk-chat .message-wrap");
    if (!messages || messages === watched) return;
    sizes.disconnect();
    sizes.observe(messages);
    sizes.observe(find("#sk-chat [role=log]"));
    watched = messages;
  }).observe(document.documentElement, { childList: true, subtree: true });
  document.addEventListener("keydown", (event) => {
    const inField = event.target.closest?.("#sk-model, #sk-chat textarea"); // Esc means them
    if (event.key !== "Escape" || event.isComposing || inField || find("dialog[open]")) return;
    find("#sk-box [data-testid=stop-button]")?.click();
  });

  // ---- calls of tools: the buttons of a question; a double click may be meant for the one before
  let decision = "";
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("#sk-note [data-decide]");
    if (!button || event.detail > 1) return;
    decision = button.dataset.decide;
    find("#sk-decide").click();
  });
  window.servekitDecision = () => decision;

  // ---- the server: the status is asked for once a second
  const ask = window.fetch.bind(window);
  const tell = (gone) => {
    const place = find("#sk-gone [role=alert]");
    if (!place || gone === (place.textContent !== "")) return;
    find("#sk-body").toggleAttribute("data-gone", gone);
    place.textContent = gone ? place.dataset.text : "";
  };
  window.fetch = async (...asked) => {
    try {
      const answer = await ask(...asked);
      tell(false);
      return answer;
    } catch (error) {
      if (error.name !== "AbortError") tell(true);
      throw error;
    }
  };
})();
