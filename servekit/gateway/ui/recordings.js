// The recording of the page Transcribe: chosen, dropped, pasted or spoken, and made a file that servekit
// reads. It stays in this page. `servekitRecordings.get` and `say` are for transcripts.js.
(() => {
  const RATE = 16000; // samples a second that are sent, as Whisper hears them
  const HEAD_BYTES = 44;
  // The first bytes of what servekit reads, as in servekit/engines/media/recording.py. The browser
  // decodes all else.
  const READ = /^(RIFF[^]{4}WAVE|fLaC|OggS|ID3|FORM[^]{4}AIF[FC]|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff])/;
  const MOST_DECODED_BYTES = 2 ** 29;
  let taken = null; // { blob, name, url, seconds, spoken }
  let microphone = null; // { stream, context, blocks, count, peak } while it is open
  let working = false; // a file is being read
  let locked = () => false; // while a recording is transcribed

  const root = () => document.querySelector(".sk-recorder");
  const find = (selector) => root().querySelector(selector);
  const say = (key, values = {}) => {
    const texts = JSON.parse(root().dataset.texts);
    return (texts[`transcribe.${key}`] ?? texts[key]).replace(/\{(\w+)\}/g, (_, field) => values[field]);
  };
  const complain = (sentence) => (find("[role=alert]").textContent = sentence);
  const announce = (sentence) => (find("[role=status]").textContent = sentence);
  const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
  const clock = (seconds) => {
    const whole = Math.floor(seconds);
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    const two = (number) => String(number).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
  };
  const mostBytes = () => Number(root().dataset.mostBytes);
  /** The longest recording that is sent as WAV, s. */
  const mostSentS = () => (mostBytes() - HEAD_BYTES) / (2 * RATE);
  /** The longest that the model hears, s. */
  const mostHeardS = () => Number(document.querySelector(".sk-hears")?.dataset.mostS) || Infinity;

  // ---- WAV
  const writeWav = (samples) => {
    const view = new DataView(new ArrayBuffer(HEAD_BYTES + 2 * samples.length));
    const text = (at, word) => [...word].forEach((one, index) => view.setUint8(at + index, one.charCodeAt(0)));
    text(0, "RIFF");
    view.setUint32(4, 36 + 2 * samples.length, true);
    text(8, "WAVEfmt ");
    view.setUint32(16, 16, true);
    view.setUint16(20, 1, true); // integers
    view.setUint16(22, 1, true); // one channel
    view.setUint32(24, RATE, true);
    view.setUint32(28, 2 * RATE, true);
    view.setUint16(32, 2, true);
    view.setUint16(34, 16, true);
    text(36, "data");
    view.setUint32(40, 2 * samples.length, true);
    samples.forEach((sample, at) => {
      view.setInt16(HEAD_BYTES + 2 * at, Math.max(-1, Math.min(1, sample)) * 32767, true);
    });
    return new Blob([view], { type: "audio/wav" });
  };
  const mix = (sound) => {
    const samples = sound.getChannelData(0);
    for (let channel = 1; channel < sound.numberOfChannels; channel++) {
      sound.getChannelData(channel).forEach((sample, at) => (samples[at] += sample));
    }
    return samples.map((sample) => sample / sound.numberOfChannels);
  };
  /** How long a file is as the browser plays it, s; NaN if it does not. */
  const measure = (url) =>
    new Promise((resolve) => {
      const audio = new Audio();
      audio.onloadedmetadata = () => resolve(audio.duration);
      audio.onerror = () => resolve(NaN);
      audio.preload = "metadata";
      audio.src = url;
    });

  // ---- files
  const take = async (file) => {
    if (locked() || working || microphone) return complain(say("busy"));
    working = true;
    complain("");
    try {
      await read(file);
    } finally {
      working = false;
    }
  };
  const read = async (file) => {
    const { name, size } = file;
    let head;
    try {
      head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
    } catch { // a folder
      return complain(say("kind", { name }));
    }
    if (!size) return complain(say("empty", { name }));
    const url = URL.createObjectURL(file);
    const seconds = await measure(url);
    URL.revokeObjectURL(url);
    if (READ.test(head) && size <= mostBytes()) {
      const blob = new Blob([await file.arrayBuffer()], { type: file.type }); // the file may change
      return keep({ blob, name, url: URL.createObjectURL(blob), seconds });
    }
    const isLong = (length) => Number.isFinite(length) && length > mostSentS();
    const tellLong = (length) => complain(say("long", { name, length: clock(length), most: clock(mostSentS()) }));
    if (isLong(seconds)) return tellLong(seconds);
    if (size > MOST_DECODED_BYTES) {
      return complain(say("large", { name, size: megabytes(size), most: megabytes(mostBytes()) }));
    }
    announce(say("converting", { name }));
    let sound;
    try {
      sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
    } catch { // neither a recording nor a film with sound
      return complain(say("kind", { name }));
    }
    if (isLong(sound.duration)) return tellLong(sound.duration);
    keepWav(mix(sound), name, { facts: say("converted") });
  };
  const keepWav = (samples, name, more) => {
    const blob = writeWav(samples);
    keep({ blob, name, url: URL.createObjectURL(blob), seconds: samples.length / RATE, ...more });
  };
  const keep = (recording) => {
    if (taken) URL.revokeObjectURL(taken.url);
    taken = recording;
    const { name, url, blob, seconds, facts } = taken;
    find(".sk-taken b").textContent = name;
    const told = [seconds < Infinity ? clock(seconds) : "", `${megabytes(blob.size)} MB`, facts ?? ""];
    find(".sk-taken .sk-quiet").textContent = told.filter(Boolean).join(" · ");
    const audio = find("audio");
    audio.hidden = Number.isNaN(seconds); // the browser plays fewer kinds than servekit reads
    audio.src = url;
    find(".sk-taken").hidden = false;
    announce(`${name}, ${told.filter(Boolean).join(", ")}`);
  };

  // ---- the microphone
  const TAP = `registerProcessor("servekit-tap", class extends AudioWorkletProcessor {
    constructor() {
      super();
      this.block = new Float32Array(512);
      this.at = 0;
    }
    process([[samples]]) {
      if (!samples) return true;
      this.block.set(samples, this.at);
      this.at += samples.length;
      if (this.at >= this.block.length) {
        this.port.postMessage(this.block.slice());
        this.at = 0;
      }
      return true;
    }
  });`;
  const record = async () => {
    if (locked() || working) return complain(say("busy"));
    complain("");
    working = true;
    try {
      await open();
    } catch (error) {
      const known = { NotAllowedError: "denied", NotFoundError: "no_microphone" };
      complain(say(known[error.name] ?? "microphone", { reason: error.message }));
      close();
    } finally {
      working = false;
    }
    showState();
  };
  const open = async () => {
    if (!navigator.mediaDevices) return complain(say(isSecureContext ? "no_microphone" : "insecure"));
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    microphone = { stream, blocks: [], count: 0, peak: 0 };
    let context = new AudioContext({ sampleRate: RATE });
    let source;
    try {
      source = context.createMediaStreamSource(stream);
    } catch { // Firefox, if the microphone has another rate
      context.close();
      context = new AudioContext();
      source = context.createMediaStreamSource(stream);
    }
    microphone.context = context;
    const module = URL.createObjectURL(new Blob([TAP], { type: "text/javascript" }));
    await context.audioWorklet.addModule(module);
    URL.revokeObjectURL(module);
    const tap = new AudioWorkletNode(context, "servekit-tap", { channelCount: 1, channelCountMode: "explicit" });
    tap.port.onmessage = ({ data }) => hear(data);
    source.connect(tap).connect(context.destination); // silence; else it may not be run
    stream.getAudioTracks()[0].addEventListener("ended", end); // it was pulled out
  };
  const hear = (block) => {
    if (!microphone) return;
    microphone.blocks.push(block);
    microphone.count += block.length;
    const peak = block.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
    microphone.peak = Math.max(microphone.peak, peak);
    find("meter").value = peak;
    const seconds = microphone.count / microphone.context.sampleRate;
    find("[role=timer]").textContent = clock(seconds);
    const mostS = Math.min(mostSentS() - 1, mostHeardS());
    if (seconds >= mostS) end().then(() => complain(say("limit", { most: clock(mostS) })));
  };
  const close = () => {
    microphone?.stream.getTracks().forEach((track) => track.stop());
    microphone?.context?.close();
    microphone = null;
  };
  const end = async () => {
    if (!microphone) return;
    const { blocks, count, peak, context } = microphone;
    const rate = context.sampleRate;
    close();
    showState();
    let samples = new Float32Array(count);
    blocks.reduce((at, block) => (samples.set(block, at), at + block.length), 0);
    if (!count) return complain(say("silent"));
    if (rate !== RATE) samples = await resample(samples, rate);
    // the last block ends beyond the limit, and the model would refuse all of it
    keepWav(samples.subarray(0, mostHeardS() * RATE), say("recorded"), { spoken: true });
    if (!peak) complain(say("silent"));
  };
  const resample = async (samples, rate) => {
    const target = new OfflineAudioContext(1, Math.ceil((samples.length * RATE) / rate), RATE);
    const source = target.createBufferSource();
    source.buffer = target.createBuffer(1, samples.length, rate);
    source.buffer.copyToChannel(samples, 0);
    source.connect(target.destination);
    source.start();
    return (await target.startRendering()).getChannelData(0);
  };
  const showState = () => {
    const button = find(".sk-record");
    button.toggleAttribute("data-on", microphone !== null);
    button.querySelector("span").textContent = say(microphone ? "end" : "record");
    find(".sk-level").hidden = !microphone;
    find(".sk-taken").hidden = microphone !== null || !taken;
  };

  // ---- the page
  document.addEventListener("click", (event) => {
    if (event.target.closest?.(".sk-choose")) find("input").click();
    if (event.target.closest?.(".sk-record")) microphone ? end() : record();
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches?.(".sk-recorder input")) return;
    const [file] = event.target.files;
    if (file) take(file);
    event.target.value = ""; // else the same file cannot be chosen again
  });
  const takeFirst = async (files) => {
    await take(files[0]);
    if (files.length > 1) complain(say("one", { name: files[0].name }));
  };
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!root() || !files.length) return;
    event.preventDefault();
    takeFirst(files);
  });
  servekitOnDrop(
    () => root(),
    (dropping) => root()?.toggleAttribute("data-dropping", dropping),
    (files) => files.length && takeFirst(files),
  );
  window.addEventListener("beforeunload", (event) => {
    if (microphone || (taken?.spoken && !taken.sent)) event.preventDefault(); // nowhere else
  });
  window.servekitRecordings = {
    say, complain, clock, mostHeardS, root, end,
    get: () => taken,
    lockWhile: (test) => (locked = test),
  };
})();
