// Prometheus text, as read from /metrics, and what can be computed from two readings of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by metric name: Map of name to [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value;
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value });
  }
  return samples;
}

/** Sum of a metric's samples that have these labels; undefined where there is none. */
export function sum(samples, name, labels = {}) {
  const wanted = Object.entries(labels);
  const found = (samples.get(name) ?? []).filter((s) => wanted.every(([k, v]) => s.labels[k] === v));
  return found.length ? found.reduce((total, s) => total + s.value, 0) : undefined;
}

/** Increase of a counter between two readings; from zero where the server started anew in between. */
export function increase(before, after, name, labels = {}) {
  const end = sum(after, name, labels);
  const begin = sum(before, name, labels) ?? 0;
  return end === undefined ? undefined : end < begin ? end : end - begin;
}

/** Bounds and counts of a histogram's buckets between two readings: [[upper bound, count]]. */
export function buckets(before, after, name) {
  const bounds = (after.get(`${name}_bucket`) ?? []).map((s) => s.labels.le);
  let below = 0;
  return bounds.map((le) => {
    const upTo = increase(before, after, `${name}_bucket`, { le });
    const count = upTo - below;
    below = upTo;
    return [le === "+Inf" ? Infinity : Number(le), count];
  });
}

/** The q-quantile of bucketed samples, interpolated inside its bucket; undefined without samples. */
export function quantile(q, counted) {
  const total = counted.reduce((all, [, count]) => all + count, 0);
  if (!total) return undefined;
  let seen = 0;
  let low = 0;
  for (const [high, count] of counted) {
    if (count && seen + count >= q * total) {
      return high === Infinity ? low : low + ((high - low) * (q * total - seen)) / count;
    }
    seen += count;
    low = high;
  }
  return low;
}
