// The openai package of npm: chats, streams, responses, pictures, recordings, transcriptions.
import { createReadStream, readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";

const { SERVED_URL, SERVED_MODEL, SERVED_KEY, SERVED_PICTURE, SERVED_SPEECH } = process.env;
const { SERVED_EYES, SERVED_EARS, SERVED_WHISPER } = process.env;
const MEDIA_TOKENS = 16;
const client = new OpenAI({ baseURL: `${SERVED_URL}/v1`, apiKey: SERVED_KEY, maxRetries: 0 });
const question = { type: "text", text: "What is this?" };

async function check(what, run) {
  let why = "";
  try {
    await run();
  } catch (error) {
    console.error(error);
    why = String(error).split("\n")[0].slice(0, 300) || "no message";
  }
  console.log("RESULT " + JSON.stringify([what, why]));
}

function assert(good, told) {
  if (!good) throw new Error(JSON.stringify(told) ?? "not so");
}

function encode(file) {
  return readFileSync(file).toString("base64");
}

// Ask whole and streamed; the texts are the same.
async function ask(model, content, leastTokens = 0) {
  const messages = [{ role: "user", content }];
  const asked = { model, messages, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  assert(whole.usage.prompt_tokens > leastTokens, whole.usage);
  let text = "";
  for await (const piece of await client.chat.completions.create({ ...asked, stream: true }))
    text += piece.choices[0]?.delta?.content ?? "";
  assert(text && text === whole.choices[0].message.content, [text, whole]);
}

async function respond(model, part) {
  const input = [{ role: "user", content: [part, { type: "input_text", text: "What is this?" }] }];
  const asked = { model, input, max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(asked);
  assert(whole.usage.input_tokens > MEDIA_TOKENS, whole.usage);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true }))
    if (event.type === "response.output_text.delta") text += event.delta;
  assert(text && text === whole.output_text, [text, whole]);
}

await check("chat", () => ask(SERVED_MODEL, "What is the capital of France?"));

if (SERVED_EYES) {
  const uri = `data:image/png;base64,${encode(SERVED_PICTURE)}`;
  const image = { type: "image_url", image_url: { url: uri } };
  await check("picture", () => ask(SERVED_EYES, [question, image], MEDIA_TOKENS));
  await check("picture_in_response", () =>
    respond(SERVED_EYES, { type: "input_image", image_url: uri, detail: "auto" }),
  );
}

if (SERVED_EARS) {
  const sound = { data: encode(SERVED_SPEECH), format: "wav" };
  const part = { type: "input_audio", input_audio: sound };
  await check("recording", () => ask(SERVED_EARS, [question, part], MEDIA_TOKENS));
}

if (SERVED_WHISPER) {
  const model = SERVED_WHISPER;
  await check("transcription", async () => {
    const bytes = await toFile(readFileSync(SERVED_SPEECH), "a.wav");
    for (const file of [createReadStream(SERVED_SPEECH), bytes]) {
      const made = await client.audio.transcriptions.create({ model, file });
      assert(made.text && made.usage.seconds === 2, made);
    }
    const file = createReadStream(SERVED_SPEECH);
    const told = await client.audio.transcriptions.create({
      model,
      file,
      response_format: "verbose_json",
      timestamp_granularities: ["word", "segment"],
    });
    assert(told.segments.length && told.words.length, told);
  });
  await check("transcription_streamed", async () => {
    const file = () => createReadStream(SERVED_SPEECH);
    const whole = await client.audio.transcriptions.create({ model, file: file() });
    let text = "";
    let last;
    const asked = { model, file: file(), stream: true };
    for await (const event of await client.audio.transcriptions.create(asked)) {
      if (event.type === "transcript.text.delta") text += event.delta;
      last = event;
    }
    assert(text.trim() === whole.text && last.text === whole.text, [text, last, whole]);
  });
  await check("translation", async () => {
    const file = createReadStream(SERVED_SPEECH);
    assert((await client.audio.translations.create({ model, file })).text);
  });
}
