// What OpenAI's Node client asks: run with TANDEM_HTTP set, it fails if an answer is not as expected.
import assert from "node:assert";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const model = "smollm2-135m";
const france = "What is the capital of France?";
const paris = "The capital of France is Paris.";
const city = { type: "object", properties: { city: { enum: ["Paris", "Oslo"] } }, required: ["city"], additionalProperties: false };
const parsed = (text) => JSON.parse(text).city;
const client = new OpenAI({ baseURL: `${process.env.TANDEM_HTTP}/v1`, apiKey: "none" });
const user = (content) => [{ role: "user", content }];

const answer = await client.chat.completions.create({ model, messages: user(france), temperature: 0 });
assert.equal(answer.choices[0].message.content, paris);

const predicted = await client.chat.completions.create({ model, messages: user(france), temperature: 0, prediction: { type: "content", content: paris } });
assert.equal(predicted.choices[0].message.content, paris);
assert.ok(predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages: user(france), temperature: 0, stream: true })) {
  streamed += chunk.choices[0].delta.content ?? "";
}
assert.equal(streamed, paris);

const response_format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: city } };
const structured = await client.chat.completions.parse({ model, messages: user("Name a city."), temperature: 0, response_format });
assert.ok(["Paris", "Oslo"].includes(structured.choices[0].message.parsed?.city ?? parsed(structured.choices[0].message.content)));

const get_weather = { name: "get_weather", description: "Weather of a city", strict: true, parameters: city };
const tools = [{ type: "function", function: get_weather }];
const asked = { model, messages: user("What is the weather in Oslo?"), tools, temperature: 0 };
const call = (await client.chat.completions.stream({ ...asked, tool_choice: "required", parallel_tool_calls: false }).finalMessage()).tool_calls[0];
assert.equal(call.function.name, "get_weather");
assert.ok(["Paris", "Oslo"].includes(parsed(call.function.arguments)));

// An agent of three turns. In two, the client's own loop runs the function and asks again; the third answers in text.
const cities = [];
const weather = { ...get_weather, parse: JSON.parse, function: (args) => { cities.push(args.city); return "Sunny, 20 degrees."; } };
const turn = { ...asked, max_tokens: 64, parallel_tool_calls: false, messages: user("Compare the weather in Oslo and Paris.") };
const loop = client.chat.completions.runTools({ ...turn, tools: [{ type: "function", function: weather }], tool_choice: "required" }, { maxChatCompletions: 2 });
await loop.done();
assert.deepEqual(loop.allChatCompletions().map((each) => each.choices[0].finish_reason), ["tool_calls", "tool_calls"]);
assert.deepEqual(loop.messages.map((each) => each.role), ["user", "assistant", "tool", "assistant", "tool"]);
assert.equal(cities.length, 2);
assert.ok(cities.every((each) => ["Paris", "Oslo"].includes(each)), cities);
const ids = loop.messages.flatMap((each) => each.tool_calls ?? []).map((each) => each.id);
assert.deepEqual(loop.messages.filter((each) => each.role === "tool").map((each) => each.tool_call_id), ids);
const third = (await client.chat.completions.create({ ...turn, messages: loop.messages, tool_choice: "none" })).choices[0];
assert.ok(third.message.content);
assert.ok(!third.message.tool_calls?.length);

const response = await client.responses.create({ model, input: france, temperature: 0 });
assert.equal(response.output_text, paris);
console.log(`openai for Node ${VERSION}: ok`);
