// The text of a recording, on the page Transcribe: asked for through the API, shown as it comes, saved,
// and played along. It is only ever set as text, never as HTML.
(() => {
  const { say, complain, clock, mostHeardS, root, end, get, lockWhile } = servekitRecordings;
  // Streams of all tabs at once: a browser opens six connections to a server, also for its pages.
  const MOST_STREAMS = 4;
  let run = null; // the AbortController of the request under way
  let result = null; // { recording, segments, text, language, duration }
  let fault = "";

  const find = (selector) => document.querySelector(`#sk-transcript ${selector}`);
  const player = () => root().querySelector("audio");
  const note = (sentence) => (find(".sk-progress").textContent = sentence);
  lockWhile(() => run !== null);
  /** Show what the server said, in the page's language: the button's callback translates it. */
  const showFault = (sentence) => {
    fault = sentence;
    document.querySelector("#sk-fault").classList.toggle("sk-shown", sentence !== "");
    if (sentence) document.querySelector("#sk-tell").click();
  };

  // ---- asking
  const start = async (model, language, translate, times, prompt) => {
    if (run) return;
    run = new AbortController();
    const { signal } = run;
    let [letGo, hasAnswer] = [() => {}, false];
    complain("");
    showFault("");
    try {
      await end(); // what is spoken now
      const recording = get();
      if (!recording) return complain(say("no_recording"));
      if (!model) return complain(say("no_model"));
      if (recording.seconds > mostHeardS()) {
        const [length, most] = [recording.seconds, mostHeardS()].map(clock);
        return complain(say("too_long", { length, most }));
      }
      const form = makeForm(recording, { model, language, prompt }, times);
      note(say("sending"));
      letGo = await waitForTurn(signal);
      begin(recording);
      const { transcribe, translate: inEnglish } = root().dataset;
      const body = { method: "POST", body: form, signal };
      const answer = await fetch(translate ? inEnglish : transcribe, body);
      hasAnswer = true;
      await read(answer);
      recording.sent = true;
    } catch (error) {
      note(signal.aborted ? say("stopped") : "");
      if (error instanceof Refused) showFault(error.message);
      else if (!signal.aborted) complain(say(hasAnswer ? "cut" : "gone"));
    } finally {
      letGo();
      run = null;
    }
  };
  class Refused extends Error {}
  const makeForm = (recording, fields, times) => {
    const form = new FormData();
    for (const [name, text] of Object.entries(fields)) if (text?.trim()) form.append(name, text.trim());
    form.append("response_format", times ? "verbose_json" : "json");
    form.append("stream", "true");
    form.append("queue_position", "true");
    form.append("file", recording.blob, "recording");
    return form;
  };
  /** Wait until few tabs of this browser stream; return what ends the turn. */
  const waitForTurn = async (signal) => {
    if (!navigator.locks) return () => {}; // over plain HTTP from another host
    const name = (at) => `servekit.transcribe.${at}`;
    const hold = (at, options) =>
      new Promise((resolve, reject) => {
        const held = (lock) => lock ? new Promise((letGo) => resolve(letGo)) : resolve(null);
        navigator.locks.request(name(at), options, held).catch(reject);
      });
    for (let at = 0; at < MOST_STREAMS; at++) {
      const letGo = await hold(at, { ifAvailable: true });
      if (letGo) return letGo;
    }
    note(say("tabs"));
    return hold(Math.floor(Math.random() * MOST_STREAMS), { signal });
  };

  // ---- the answer
  const begin = (recording) => {
    result = { recording, segments: [], text: "", duration: recording.seconds };
    find("pre").replaceChildren();
    find(".sk-about").textContent = "";
    find(".sk-transcript").hidden = true;
    note(say("running"));
  };
  const read = async (answer) => {
    if (!answer.ok) throw new Refused(await explain(answer));
    if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) {
      return finish(await answer.json()); // of another server, which does not stream
    }
    let rest = "";
    for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ; ) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      blocks.forEach(readBlock);
    }
    if (!result.done) throw new TypeError("the stream has ended early");
  };
  const explain = async (answer) => {
    try {
      return (await answer.json()).error.message;
    } catch { // of a proxy
      return `${answer.status} ${answer.statusText}`;
    }
  };
  const readBlock = (block) => {
    const place = block.match(/^: queue position (\d+)/)?.[1];
    if (place) {
      const which = place === "0" ? "next" : place === "1" ? "one" : "many";
      return note(say(`queue.${which}`, { count: place }));
    }
    const data = block.replace(/^data: ?/, "");
    if (data === block) return; // a comment
    if (data === "[DONE]") return finish({});
    const event = JSON.parse(data);
    if (event.error) throw new Refused(event.error.message);
    if (event.type === "transcript.text.done") return finish(event);
    if (event.type === "transcript.text.segment") addSegment(event);
    else addText(event.delta ?? event.choices?.[0]?.delta?.content ?? ""); // the latter is vLLM's
  };
  const addText = (text) => {
    result.text += text;
    result.unplaced = (result.unplaced ?? "") + text;
    find(".sk-transcript").hidden = false;
    draw();
    note(say("running"));
  };
  const addSegment = ({ start, end, text }) => {
    result.segments.push({ start, end, text });
    result.unplaced = "";
    draw();
    note(say("heard", { at: clock(end), length: clock(result.duration || end) }));
  };
  const finish = ({ text, language, duration, segments }) => {
    if (result.done) return;
    result.done = true;
    result.text = text ?? result.text;
    result.language = language;
    result.duration = duration ?? result.duration;
    if (segments && !result.segments.length) segments.forEach(addSegment);
    if (!result.segments.length) result.unplaced = result.text;
    draw();
    find(".sk-transcript").hidden = !result.text;
    find(".sk-about").textContent = [language, duration && clock(duration)].filter(Boolean).join(" · ");
    note(result.text ? "" : say("nothing"));
  };
  /** Show new segments, and text that has no time yet, or gets none, behind them. */
  const draw = () => {
    const box = find("pre");
    const follows = box.scrollHeight - box.clientHeight - box.scrollTop < 8;
    box.querySelector(".sk-unplaced")?.remove();
    const shown = box.childElementCount;
    result.segments.slice(shown).forEach((segment, at) => box.append(makeSegment(segment, shown + at)));
    if (result.unplaced) {
      const more = document.createElement("span");
      more.className = "sk-unplaced";
      more.textContent = result.segments.length ? result.unplaced : result.unplaced.trimStart();
      box.append(more);
    }
    if (follows) box.scrollTop = box.scrollHeight;
    for (const form of ["srt", "vtt"]) find(`[data-save=${form}]`).hidden = !result.segments.length;
  };
  const makeSegment = ({ start, text }, at) => {
    const made = document.createElement("span");
    made.className = "sk-segment";
    made.setAttribute("role", "button");
    made.tabIndex = at ? -1 : 0; // the arrow keys lead to the others
    made.dataset.at = clock(start);
    made.dir = "auto";
    made.textContent = at ? text : text.trimStart();
    return made;
  };

  // ---- playing along
  const segmentsIn = (box) => [...box.querySelectorAll(".sk-segment")];
  const play = (segment) => {
    if (result.recording !== get() || player().hidden) return;
    player().currentTime = result.segments[segmentsIn(segment.parentElement).indexOf(segment)].start;
    player().play();
  };
  document.addEventListener("click", (event) => {
    const segment = event.target.closest?.(".sk-segment");
    if (segment && getSelection().isCollapsed) play(segment); // else it is marked, to copy
    const form = event.target.closest?.("#sk-transcript [data-save]")?.dataset.save;
    if (form) servekitDownload(write[form](), `${result.recording.name.replace(/\.\w+$/, "")}.${form}`);
  });
  const STEPS = { ArrowDown: 1, ArrowUp: -1, Home: -1e9, End: 1e9 };
  document.addEventListener("keydown", (event) => {
    const segment = event.target.closest?.(".sk-segment");
    if (!segment) return;
    if (event.key in STEPS) {
      const all = segmentsIn(segment.parentElement);
      const to = Math.max(0, Math.min(all.length - 1, all.indexOf(segment) + STEPS[event.key]));
      segment.tabIndex = -1;
      all[to].tabIndex = 0;
      all[to].focus();
    } else if (event.key === "Enter" || event.key === " ") play(segment);
    else return;
    event.preventDefault();
  });
  document.addEventListener("timeupdate", ({ target }) => {
    if (!root()?.contains(target) || !result?.segments.length || target.src !== result.recording.url) return;
    const now = target.currentTime;
    const at = result.segments.findLastIndex(({ start, end }) => start <= now && now < end);
    segmentsIn(find("pre")).forEach((one, index) => {
      if (one.toggleAttribute("data-now", index === at && !target.paused)) one.scrollIntoView({ block: "nearest" });
    });
  }, true);

  // ---- saving
  const time = (seconds, point) => {
    const ms = Math.max(0, Math.round(seconds * 1000));
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    return `${two(ms / 3600000)}:${two((ms / 60000) % 60)}:${two((ms / 1000) % 60)}${point}${String(ms % 1000).padStart(3, "0")}`;
  };
  const cue = ({ start, end, text }, point) => {
    // an arrow or an empty line would begin another cue, as in api/audio/subtitles.py
    const line = text.trim().split(/\s+/).join(" ").replaceAll("-->", "->");
    return `${time(start, point)} --> ${time(end, point)}\n${line}\n`;
  };
  const write = {
    txt: () => `${result.text.trim()}\n`,
    srt: () => result.segments.map((one, at) => `${at + 1}\n${cue(one, ",")}`).join("\n"),
    vtt: () => ["WEBVTT\n", ...result.segments.map((one) => cue(one, "."))].join("\n"),
    json: () => {
      const { text, language, duration, segments } = result;
      return `${JSON.stringify({ text: text.trim(), language, duration, segments }, null, 2)}\n`;
    },
  };
  window.servekitTranscripts = {
    run: (...chosen) => void start(...chosen),
    stop: () => void run?.abort(),
    fault: () => fault,
  };
})();
