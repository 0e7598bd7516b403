/**
 * Opens every field of a streamloader dataset (format version 1, see SPEC.md) with zarrita.
 *
 * zarrita has no data type for bytes, does not check checksums, and reads what is missing as zeros. So each field is
 * opened by its entry in the manifest, through a store that checks what it reads and two codecs with names of our own:
 * nothing changes for other arrays that you open with zarrita.
 */
import * as zarr from "zarrita";

const TYPES = {
  __proto__: null,
  ...{ int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array },
  ...{ uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array },
  // node before 24 and older browsers have no Float16Array
  ...{ float16: globalThis.Float16Array, float32: Float32Array, float64: Float64Array, bool: zarr.BoolArray },
};
const KINDS = ["tensor", "bytes", "text", "ragged"];
const COMPRESSORS = {
  __proto__: null,
  ...{ none: [], lz4: [{ name: "blosc", configuration: {} }], zstd: [{ name: "zstd", configuration: {} }] },
};
const BYTES = { name: "bytes", configuration: { endian: "little" } };
const CRC32C = { name: "crc32c" };
const ABSENT = 2n ** 64n - 1n;
const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0x82f63b78 : n >>> 1;
  return n;
});

const product = (shape) => shape.reduce((a, b) => a * b, 1);
const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** Throws unless the condition holds. */
function check(condition, message) {
  if (!condition) throw new Error(message);
}

function typeOf(dtype) {
  check(TYPES[dtype], `this JavaScript runtime has no typed array for dtype ${dtype}`);
  return TYPES[dtype];
}

/** Returns whether the bytes end with the CRC-32C of those before. */
function intact(bytes) {
  const size = bytes.length - 4;
  let crc = -1;
  for (let i = 0; i < size; i++) crc = CRC_TABLE[(crc ^ bytes[i]) & 255] ^ (crc >>> 8);
  return size >= 0 && ~crc >>> 0 === viewOf(bytes).getUint32(size, true);
}

/** Registers a codec that only decodes; `decode` gets the bytes, the configuration and the chunk's shape. */
function register(name, kind, decode) {
  const fromConfig = (config, { shape }) => ({ kind, decode: (bytes) => decode(bytes, config, shape) });
  zarr.registry.set(name, () => ({ fromConfig }));
}

/** Splits a chunk of a field of variable length into its items, each a Uint8Array of its own. */
function splitItems(bytes, _, shape) {
  const view = viewOf(bytes);
  const count = view.getUint32(0, true);
  check(count === shape[0], `the chunk states ${count} items, not ${shape[0]}`);
  const data = [];
  let end = 4;
  while (data.length < count) {
    const start = end + 4;
    check(start <= bytes.length, `the chunk ends before item ${data.length}`);
    end = start + view.getUint32(end, true);
    data.push(bytes.slice(start, end));
  }
  check(end === bytes.length, `the items end at byte ${end} of a chunk of ${bytes.length} bytes`);
  return { data, shape, stride: [1] };
}

/** Checks the size of a decoded tensor chunk: zarrita would read zeros where it is too short. */
function checkSize(bytes, { nbytes }) {
  check(bytes.length === nbytes, `the chunk has ${bytes.length} bytes, not ${nbytes}`);
  return bytes;
}

register("streamloader.items", "array_to_bytes", splitItems);
register("streamloader.size", "bytes_to_bytes", checkSize);

/** Returns the store of a field, where a shard or chunk that is missing or damaged is an error. */
function checkedStore(store, numSamples, { chunk, shard }) {
  async function getRange(key, range, options) {
    const bytes = await store.getRange(key, range, options);
    check(bytes, `${key} is missing`);
    check(intact(bytes), `${key} is damaged: a crc32c does not match`);
    if (range.suffixLength) {
      const index = viewOf(bytes);
      const samples = Math.min(shard, numSamples - shard * Number(key.match(/\/c\/(\d+)/)[1]));
      for (let i = 0; i * chunk < samples; i++)
        check(index.getBigUint64(16 * i, true) !== ABSENT, `${key}: chunk ${i} is missing`);
    }
    return bytes;
  }
  return { getRange };
}

/** Returns the zarrita array of a field: numbers for a tensor, else one Uint8Array for each sample. */
function openArray(store, path, { numSamples, kind, dtype, shape, chunk, shard, codec }) {
  const tensor = kind === "tensor";
  const inner = tensor ? shape : [];
  const size = () => ({ nbytes: chunk * product(inner) * new (typeOf(dtype))(0).BYTES_PER_ELEMENT });
  const numbers = () => [BYTES, { name: "streamloader.size", configuration: size() }];
  const codecs = [...(tensor ? numbers() : [{ name: "streamloader.items" }]), ...COMPRESSORS[codec], CRC32C];
  const sharding = { chunk_shape: [chunk, ...inner], codecs, index_codecs: [BYTES, CRC32C] };
  return new zarr.Array(checkedStore(store, numSamples, { chunk, shard }), path, {
    shape: [numSamples, ...inner],
    data_type: tensor ? dtype : "v2:object", // zarrita's name for a plain JavaScript array
    chunk_grid: { name: "regular", configuration: { chunk_shape: [shard, ...inner] } },
    chunk_key_encoding: { name: "default" },
    codecs: [{ name: "sharding_indexed", configuration: sharding }],
  });
}

/** Returns the value of an item: the bytes, a string, or the typed array and shape of a ragged sample. */
export function decodeItem({ kind, dtype, shape }, item) {
  if (kind === "bytes") return item;
  if (kind === "text") return UTF8.decode(item);
  const data = new (typeOf(dtype))(item.slice().buffer);
  const rows = data.length / product(shape);
  check(Number.isInteger(rows), `a ragged item of ${item.length} bytes is not whole rows`);
  return { data, shape: [rows, ...shape] };
}

/** One field: `kind`, `dtype`, `shape`, `encoding` and more as in the manifest, `numSamples`, and `get`. */
class Field {
  #array;
  #open;
  constructor(store, path, numSamples, { kind, dtype, shape, encoding, chunk, shard, codec }) {
    check(KINDS.includes(kind), `${path}: unknown kind ${kind}`);
    check(codec in COMPRESSORS, `${path}: unknown codec ${codec}`);
    Object.assign(this, { numSamples, kind, dtype, shape, encoding, chunk, shard, codec });
    this.#open = () => openArray(store, path, this);
  }

  /**
   * Reads the samples from `start` up to `stop`.
   *
   * Returns `{data, shape}` for a tensor, else an array with a Uint8Array (bytes), a string (text) or `{data, shape}`
   * (ragged) for each sample. `data` is a typed array: BigInt64Array for int64, zarrita's BoolArray for bool.
   * `options` are those of zarrita's `get`, such as `signal`.
   */
  async get(start = 0, stop = this.numSamples, options = {}) {
    const range = `samples ${start} to ${stop} are not within 0 to ${this.numSamples}`;
    check(0 <= start && start <= stop && stop <= this.numSamples, range);
    const tensor = this.kind === "tensor";
    if (start === stop) return tensor ? { data: new (typeOf(this.dtype))(0), shape: [0, ...this.shape] } : [];
    this.#array ??= this.#open();
    const all = this.#array.shape.slice(1).fill(null);
    const { data, shape } = await zarr.get(this.#array, [zarr.slice(start, stop), ...all], options);
    return tensor ? { data, shape } : data.map((item) => decodeItem(this, item));
  }
}

/**
 * Opens a dataset with one request.
 *
 * `store` is a zarrita store at the dataset's URL, and `split` one of the dataset's splits, if it has any. Returns
 * `{numSamples, fields, manifest}`; `fields` is an object with a Field by each name.
 */
export async function open(store, { split } = {}) {
  const bytes = await store.get("/zarr.json");
  check(bytes, "zarr.json is missing: there is no finished dataset here");
  const root = JSON.parse(UTF8.decode(bytes));
  const splits = root.attributes?.streamloader?.splits ?? {};
  const names = Object.keys(splits);
  check(split === undefined ? !names.length : names.includes(split), `split is ${split}; the splits are [${names}]`);
  const group = split === undefined ? root : root.consolidated_metadata?.metadata[split];
  const manifest = group?.attributes?.streamloader;
  check(manifest?.format === "streamloader", "zarr.json has no streamloader manifest");
  const unknown = manifest.requires.filter((name) => name !== "append");
  const needs = `the dataset has version ${manifest.version} and requires [${unknown}]: it needs a later reader`;
  check(manifest.version === 1 && !unknown.length, needs);
  const numSamples = manifest.num_samples;
  check(Number.isSafeInteger(numSamples), `num_samples is ${numSamples}`);
  const fields = {};
  for (const [name, entry] of Object.entries(manifest.fields)) {
    check(/^[a-z][a-z0-9_]*$/.test(name), `invalid field name ${name}`);
    fields[name] = new Field(store, `${split === undefined ? "" : `/${split}`}/${name}`, numSamples, entry);
  }
  return { numSamples, fields, manifest };
}
