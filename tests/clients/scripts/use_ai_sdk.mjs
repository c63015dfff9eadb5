// Vercel's AI SDK over @ai-sdk/openai-compatible: text, stream, a tool that is asked for, an object,
// pictures and recordings; transcriptions over @ai-sdk/openai.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { experimental_transcribe, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const { SERVED_URL, SERVED_MODEL, SERVED_KEY, SERVED_PICTURE, SERVED_SPEECH } = process.env;
const { SERVED_EYES, SERVED_EARS, SERVED_WHISPER } = process.env;
const MEDIA_TOKENS = 16;
const openai = createOpenAI({ baseURL: `${SERVED_URL}/v1`, apiKey: SERVED_KEY });
const provider = createOpenAICompatible({
  name: "servekit",
  baseURL: `${SERVED_URL}/v1`,
  apiKey: SERVED_KEY,
  supportsStructuredOutputs: true,
});
const model = provider(SERVED_MODEL);
const prompt = "What is the capital of France? Answer in one word.";
const schema = z.object({ city: z.string().max(20), days: z.number().int().min(1).max(7) });
const common = { model, prompt, maxRetries: 0 };

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

await check("text", async () => {
  const { text } = await generateText({ ...common, maxOutputTokens: 16 });
  assert(text, text);
});

await check("stream", async () => {
  const { textStream } = streamText({ ...common, maxOutputTokens: 16 });
  let text = "";
  for await (const piece of textStream) text += piece;
  assert(text, text);
});

await check("forced_tool", async () => {
  const look_up = tool({ description: "Look up the weather of a city.", inputSchema: schema });
  for (const toolChoice of ["required", { type: "tool", toolName: "look_up" }]) {
    const asked = { ...common, maxOutputTokens: 300, tools: { look_up }, toolChoice };
    const { toolCalls } = await generateText(asked);
    schema.parse(toolCalls[0].input);
  }
});

await check("object", async () => {
  const { object } = await generateObject({ ...common, maxOutputTokens: 200, schema });
  schema.parse(object);
});

// The default of its OpenAI provider; items of the first turn are referred to by their ids.
await check("responses_of_two_turns", async () => {
  const asked = { model: openai(SERVED_MODEL), maxOutputTokens: 16, maxRetries: 0 };
  const question = { role: "user", content: prompt };
  const first = await generateText({ ...asked, messages: [question] });
  const messages = [question, ...first.response.messages, { role: "user", content: "And Spain?" }];
  const second = await generateText({ ...asked, messages });
  assert(first.text && second.usage.inputTokens > first.usage.inputTokens, second.usage);
});

// Ask about a picture or a recording, whole and streamed; the texts are the same.
async function ask(model, part) {
  const content = [{ type: "text", text: "What is this?" }, part];
  const messages = [{ role: "user", content }];
  const asked = { model, messages, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
  const whole = await generateText(asked);
  assert(whole.usage.inputTokens > MEDIA_TOKENS, whole.usage);
  let text = "";
  for await (const piece of streamText(asked).textStream) text += piece;
  assert(text && text === whole.text, [text, whole.text]);
}

if (SERVED_EYES) {
  const data = readFileSync(SERVED_PICTURE);
  const parts = [
    { type: "image", image: data },
    { type: "image", image: data.toString("base64"), mediaType: "image/png" },
    { type: "file", data, mediaType: "image/png" },
  ];
  await check("picture", async () => {
    for (const part of parts)
      for (const model of [provider(SERVED_EYES), openai.chat(SERVED_EYES)]) await ask(model, part);
  });
  await check("picture_in_response", () => ask(openai.responses(SERVED_EYES), parts[0]));
}

if (SERVED_EARS) {
  const part = { type: "file", data: readFileSync(SERVED_SPEECH), mediaType: "audio/wav" };
  await check("recording", async () => {
    for (const model of [provider(SERVED_EARS), openai.chat(SERVED_EARS)]) await ask(model, part);
  });
}

if (SERVED_WHISPER)
  await check("transcription", async () => {
    const model = openai.transcription(SERVED_WHISPER);
    const audio = readFileSync(SERVED_SPEECH);
    const { text } = await experimental_transcribe({ model, audio, maxRetries: 0 });
    assert(text, text);
  });
