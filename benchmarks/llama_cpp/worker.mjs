// llama.cpp on the rows of `cpu.py`: node worker.mjs MODEL THREADS. A line of JSON in, one out.
import {createInterface} from "node:readline";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [path, threads] = [process.argv[2], Number(process.argv[3])];
const llama = await getLlama({
    gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({modelPath: path, gpuLayers: 0});

function clock() {
    const {user, system} = process.cpuUsage();
    return {wall: performance.now() / 1e3, cpu: (user + system) / 1e6};
}

function since(start) {
    const now = clock();
    return {wall: now.wall - start.wall, cpu: now.cpu - start.cpu};
}

// Answers are greedy and end at their number of tokens, as ours.
function answer(sequence, prompt) {
    return sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true});
}

async function take(tokens, count) {
    for (let i = 0; i < count; ++i) await tokens.next();
}

async function run({prompts, tokens}) {
    const longest = Math.max(...prompts.map((each) => each.length));
    const context = await model.createContext({
        sequences: prompts.length,
        contextSize: longest + tokens + 8,
        batchSize: Math.max(512, longest),
        threads,
    });
    const start = clock();
    const streams = prompts.map((prompt) => answer(context.getSequence(), prompt));
    await Promise.all(streams.map((each) => take(each, 1)));
    const first = since(start), rest = clock();
    await Promise.all(streams.map((each) => take(each, tokens - 1)));
    const then = since(rest);
    await Promise.all(streams.map((each) => each.return()));
    await context.dispose();
    return {first, then};
}

console.log(JSON.stringify({about: llama.systemInfo, release: llama.llamaCppRelease.release}));
for await (const line of createInterface({input: process.stdin})) {
    console.log(JSON.stringify(await run(JSON.parse(line))));
}
process.exit(0);
