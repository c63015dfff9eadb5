// Vercel's AI SDK over @ai-sdk/openai-compatible: text, stream, a tool that is asked for, an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const { SERVED_URL, SERVED_MODEL, SERVED_KEY } = process.env;
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
