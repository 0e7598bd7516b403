// The golden datasets have the values of golden/expected.json, and damaged ones are errors.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import FileSystemStore from "@zarrita/storage/fs";
import { registry } from "zarrita";
import { open } from "./streamloader.js";

const folder = (path) => fileURLToPath(new URL(`../${path}`, import.meta.url));
const store = (path) => new FileSystemStore(folder(path));

// JSON.parse would round integers above 2^53: they become strings first
const text = await readFile(folder("golden/expected.json"), "utf8");
const golden = JSON.parse(text.replace(/(?<=[[,])-?\d{16,}(?=[\],])/g, '"$&"'));

const FLOATS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const SKIP = globalThis.Float16Array ? {} : { float16: "zarrita needs Float16Array, which this node lacks" };

/** Returns a number of expected.json as the typed array of its dtype holds it. */
function number(dtype, value) {
  if (dtype.endsWith("int64")) return BigInt(value);
  return FLOATS[value] ?? value;
}

/** Asserts that typed array and shape are the nested lists, by Object.is: NaN is NaN, and -0 is not 0. */
function assertNumbers({ dtype, shape: inner }, { data, shape }, values) {
  assert.deepEqual(shape, [values.length, ...inner]);
  assert.deepStrictEqual([...data], values.flat(Infinity).map((value) => number(dtype, value)));
}

const CHECKS = {
  tensor: assertNumbers,
  bytes: (_, found, values) => assert.deepEqual(found.map((item) => Buffer.from(item).toString("base64")), values),
  text: (_, found, values) => assert.deepEqual(found, values),
  ragged: (field, found, values) => {
    assert.equal(found.length, values.length);
    found.forEach((item, i) => assertNumbers(field, item, values[i]));
  },
};

for (const [name, { num_samples, fields }] of Object.entries(golden)) {
  const [root, split] = name.split("/");
  for (const [key, { spec, values }] of Object.entries(fields)) {
    test(`golden ${name}: ${key} (${spec})`, { skip: SKIP[spec] }, async () => {
      const dataset = await open(store(`golden/${root}`), { split });
      assert.equal(dataset.numSamples, num_samples);
      assert.deepEqual(Object.keys(dataset.fields).sort(), Object.keys(fields).sort());
      const field = dataset.fields[key];
      const check = (found, expected) => CHECKS[field.kind](field, found, expected);
      check(await field.get(), values);
      for (let i = 0; i < num_samples; i++) check(await field.get(i, i + 1), values.slice(i, i + 1));
    });
  }
}

const readAll = (dataset) => Promise.all(Object.values(dataset.fields).map((field) => field.get()));
const DAMAGED = {
  bytes_behind_the_last_item: /items end at byte 82 of a chunk of 86/,
  flipped_chunk: /wave\/c\/0\/0 is damaged: a crc32c does not match/,
  flipped_compressed_chunk: /blob\/c\/1 is damaged/,
  missing_shard: /wave\/c\/1\/0 is missing/,
  ragged_rows_that_do_not_fit: /12 bytes is not whole rows/,
  short_fixed_chunk: /14 bytes, not 18/,
  text_that_is_no_utf8: /not valid/,
  too_new: /later reader/,
  truncated_shard: /wave\/c\/1\/0 is damaged|out of range/, // node 24 does not read before a file's start
  unfinished_writer: /no finished dataset/,
  unknown_requires: /later reader/,
  wrong_item_count: /4294967295 items, not 6/,
  zstd_bomb: /67108864 bytes, not 20/,
};

for (const [name, says] of Object.entries(DAMAGED))
  test(`${name} is an error`, () =>
    assert.rejects(
      async () => readAll(await open(store(`bad/${name}`))),
      (error) => says.test(`${error.message} ${error.cause?.message}`),
    ));

test("items that do not fill their chunk exactly are an error", () => {
  const codec = registry.get("streamloader.items")().fromConfig({}, { shape: [2] });
  const chunk = [2, 0, 0, 0, 1, 0, 0, 0, 65, 2, 0, 0, 0, 66, 67];
  const decode = (bytes) => codec.decode(Uint8Array.from(bytes)).data.map((item) => [...item]);
  assert.deepEqual(decode(chunk), [[65], [66, 67]]);
  for (let size = 0; size < chunk.length; size++) assert.throws(() => decode(chunk.slice(0, size)), `${size} bytes`);
  assert.throws(() => decode([...chunk, 0]), /items end at byte 15 of a chunk of 16/);
  for (const [at, value] of [[0, 1], [0, 3], [4, 0], [4, 2], [4, 255], [7, 255], [9, 1], [9, 3], [12, 128]])
    assert.throws(() => decode(chunk.with(at, value)), `byte ${at} is ${value}`);
});

test("a chunk that the index leaves out is an error, not zeros", async () => {
  const free = store("golden/free");
  const get = async (key) => Buffer.from(String(await free.get(key)).replace(/(?<n>"num_samples": *)20/, "$<n>22"));
  const dataset = await open({ get, getRange: free.getRange.bind(free) });
  assert.equal(dataset.numSamples, 22);
  await assert.rejects(dataset.fields.wave.get(21, 22), /wave\/c\/1\/0: chunk 3 is missing/);
});

test("samples out of range and splits that are not there are errors", async () => {
  const { fields } = await open(store("golden/free"));
  for (const [start, stop] of [[-1, 2], [3, 2], [0, 21], [0, NaN]])
    await assert.rejects(fields.wave.get(start, stop), /within 0 to 20/);
  await assert.rejects(open(store("golden/splits")), /the splits are \[train,val\]/);
  await assert.rejects(open(store("golden/splits"), { split: "test" }), /the splits are \[train,val\]/);
  await assert.rejects(open(store("golden/free"), { split: "train" }), /the splits are \[\]/);
});
