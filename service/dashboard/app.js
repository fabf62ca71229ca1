// Reads /metrics every two seconds and shows what they say.

import { bars, line } from "./charts.js";
import { buckets, increase, parse, quantile, sum } from "./metrics.js";
import { connect } from "./tryit.js";

const POLL_MS = 2000;
const WINDOW_S = 60;
const KEPT = 300;
// Not location.href: that may hold the credentials the page was opened with, which fetch refuses.
const base = location.origin + location.pathname.replace(/dashboard\/?$/, "");
const readings = [];
const trend = [];
let model;

const put = (id, text) => (document.getElementById(id).textContent = text);
const percent = (share) => (share === undefined || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(0)} %`);
const fixed = (value, digits) => (value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits));
const count = (value) => Math.round(value ?? 0).toLocaleString("en");

function duration(seconds) {
  if (seconds === undefined) return "–";
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

/** The reading to compare the newest with: the youngest that is a minute old, else the oldest. */
function minuteAgo(now) {
  const old = readings.filter(({ time }) => time <= now - WINDOW_S);
  return old.length ? old[old.length - 1] : readings[0];
}

function head(samples) {
  const info = samples.get("eyas_info")?.[0]?.labels;
  if (info) {
    model = info.model;
    put("model", info.model);
    const parts = [info.model_type, info.device, info.dtype, info.attention_backend, info.schedule];
    put("about", `${parts.join(" · ")} · K = ${info.num_speculative_tokens} · version ${info.version}`);
  }
  const ready = sum(samples, "eyas_ready") === 1;
  const state = document.getElementById("state");
  state.textContent = ready ? "ready" : "not ready";
  state.className = ready ? "good" : "bad";
}

function latency(id, before, after, name) {
  const counted = buckets(before, after, name);
  put(id, duration(quantile(0.5, counted)));
  put(`${id}-more`, `median; p95 ${duration(quantile(0.95, counted))}, last minute`);
}

function tiles(before, after, seconds) {
  const accept = sum(after, "eyas_spec_accept_length");
  const tokens = seconds ? increase(before, after, "eyas_generation_tokens_total") / seconds : undefined;
  put("accept", fixed(accept, 2));
  put("tokens", fixed(tokens, tokens < 10 ? 1 : 0));
  latency("ttft", before, after, "eyas_time_to_first_token_seconds");
  latency("itl", before, after, "eyas_inter_token_latency_seconds");
  put("running", count(sum(after, "eyas_requests_running")));
  put("waiting", `running; ${count(sum(after, "eyas_requests_waiting"))} waiting`);
  return { accept: Number.isNaN(accept) ? undefined : accept, tokens };
}

function speculation(before, after) {
  const steps = buckets(before, after, "eyas_spec_accept_length_per_step").filter(([, n]) => n > 0);
  const most = Math.max(...steps.map(([, n]) => n), 0);
  const total = steps.reduce((all, [, n]) => all + n, 0);
  const entries = steps.map(([length, n]) => ({ label: length, value: n, of: most, text: percent(n / total) }));
  bars(document.getElementById("lengths"), entries);
  put("lengths-more", total ? `${count(total)} steps, last minute` : "No speculative step in the last minute.");

  const drafted = "eyas_spec_draft_tokens_per_position_total";
  const accepted = "eyas_spec_accepted_tokens_per_position_total";
  const positions = (after.get(drafted) ?? []).map((s) => s.labels.position);
  bars(
    document.getElementById("positions"),
    positions.map((position, i) => {
      const hits = sum(after, accepted, { position });
      const share = hits / sum(after, drafted, { position });
      const reached = i ? sum(after, accepted, { position: positions[i - 1] }) : sum(after, drafted, { position });
      return { label: Number(position) + 1, value: share, of: 1, text: `${percent(share)} (${percent(hits / reached)})` };
    }),
  );
}

function forwards(samples) {
  const all = samples.get("eyas_forward_total") ?? [];
  const most = Math.max(...all.map((s) => s.value), 0);
  bars(
    document.getElementById("forwards"),
    all.map(({ labels, value }) => {
      const reason = labels.path === "eager" ? `, ${labels.reason}` : "";
      return { label: `${labels.phase}: ${labels.path}${reason}`, value, of: most, text: count(value) };
    }),
  );
  const decoding = all.filter((s) => s.labels.phase !== "prefill");
  const add = (some) => some.reduce((total, s) => total + s.value, 0);
  put("replay", percent(add(decoding.filter((s) => s.labels.path === "replay")) / add(decoding)));
  const fallback = all.filter((s) => /^(above_bucket|contract|disabled|retry)$/.test(s.labels.reason));
  if (add(fallback)) put("replay-more", `${count(add(fallback))} fell back to eager`);
}

function memory(samples) {
  const states = ["used", "cached", "free"];
  const pages = states.map((state) => sum(samples, "eyas_kv_pages", { state }) ?? 0);
  const total = pages.reduce((all, n) => all + n, 0);
  const entries = states.map((label, i) => ({ label, value: pages[i], of: total, text: count(pages[i]) }));
  bars(document.getElementById("pages"), entries);
  put("kv", total ? percent(pages[0] / total) : "–");
  put("kv-more", `of ${count(total)}; ${count(sum(samples, "eyas_preemptions_total"))} preemptions`);
  const asked = sum(samples, "eyas_prefix_cache_queried_tokens_total");
  const hit = sum(samples, "eyas_prefix_cache_hit_tokens_total");
  put("pages-more", asked ? `Prefix cache: ${percent(hit / asked)} of ${count(asked)} prompt tokens were there.` : "");
}

function guard(samples) {
  const shown = [
    ["eyas_nan_guard_trips_total", "non-finite rows", true],
    ["eyas_nan_guard_pages_scrubbed_total", "pages scrubbed", false],
    ["eyas_graph_contract_violations_total", "replays refused", true],
    ["eyas_graphs_disabled", "graphs turned off", true],
    ["eyas_audit_mismatches_total", "audit mismatches", true],
  ].filter(([name]) => samples.has(name));
  const errors = sum(samples, "eyas_requests_total", { outcome: "error" }) ?? 0;
  const rows = shown.map(([name, label, bad]) => ({ label, value: sum(samples, name), bad }));
  rows.push({ label: "choices ended by an error", value: errors, bad: true });
  bars(document.getElementById("guards"), rows.map((row) => ({ ...row, of: row.value, text: count(row.value) })));
  const trips = rows.filter((row) => row.bad).reduce((all, row) => all + row.value, 0);
  put("guard", trips ? count(trips) : "quiet");
  document.getElementById("guard").className = trips ? "bad" : "";
  put("guard-more", trips ? "events since the start" : "nothing since the start");
  put("guards-more", shown.length ? "Since the start." : "This server exports no guard metrics.");
}

function drawTrend() {
  const top = (key, id, digits) => {
    const most = line(document.getElementById(id), trend.map((point) => [point.time, point[key]]));
    return most.toFixed(digits);
  };
  put("trend-accept-more", `accept length, highest ${top("accept", "trend-accept", 2)}`);
  put("trend-tokens-more", `tokens/s, highest ${top("tokens", "trend-tokens", 0)}; since this page was opened`);
}

function show(samples) {
  const time = performance.now() / 1000;
  readings.push({ time, samples });
  const old = minuteAgo(time);
  while (readings[0] !== old) readings.shift();
  head(samples);
  const now = tiles(old.samples, samples, time - old.time);
  speculation(old.samples, samples);
  forwards(samples);
  memory(samples);
  guard(samples);
  trend.push({ time, ...now });
  if (trend.length > KEPT) trend.shift();
  drawTrend();
}

async function poll() {
  try {
    const response = await fetch(`${base}metrics`, { headers: { Accept: "text/plain" } });
    if (!response.ok) throw new Error(`/metrics answers ${response.status}`);
    show(parse(await response.text()));
  } catch (error) {
    const state = document.getElementById("state");
    state.textContent = `no answer: ${error.message}`;
    state.className = "bad";
  }
  setTimeout(poll, POLL_MS);
}

connect(`${base}v1/completions`, () => model);
poll();
