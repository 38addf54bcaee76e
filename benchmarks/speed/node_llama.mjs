// A side of decoders.py: llama.cpp as the npm package node-llama-cpp ships it, which has a library for each instruction
// set. Arguments: the folder of node_modules, decode or prefill, the GGUF file, the tokens as JSON, threads, and the
// decoded tokens of a figure. Answers every line of input with the seconds of a token, or of a prompt.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, kind, modelPath, tokens, threads, block] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${folder}/node_modules/node-llama-cpp/dist/index.js`));
const ids = JSON.parse(tokens), count = Number(threads);
const llama = await getLlama({gpu: false, build: "never", maxThreads: count, logger: (_, text) => console.error(text)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: ids.length + 4096, batchSize: 512, threads: count});
const sequence = context.getSequence();

async function prompt() {
    await sequence.clearHistory();
    const start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(ids);
    return (performance.now() - start) / 1e3;
}

async function decoded(generator) {
    const start = performance.now();
    for (let i = 0; i < Number(block); i++) await generator.next();
    return (performance.now() - start) / 1e3 / Number(block);
}

let run = prompt;
if (kind === "decode") {
    await sequence.evaluateWithoutGeneratingNewTokens(ids.slice(0, -1));
    const generator = sequence.evaluate(ids.slice(-1), {temperature: 0, yieldEogToken: true});
    run = () => decoded(generator);
}
await run();
console.log("ready");
for await (const _ of createInterface({input: process.stdin})) console.log(await run());
process.exit(0);
