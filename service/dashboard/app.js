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
  if (seconds < 0.001) return `${Math.round(1e6 * seconds)} µs`;
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

function graphs(before, after) {
  const phases = (after.get("eyas_graphs_captured") ?? []).filter((s) => s.value > 0);
  const counted = phases.map((s) => `${count(s.value)} ${s.labels.phase}`).join(", ");
  const seconds = fixed(sum(after, "eyas_graph_capture_seconds"), 1);
  const mebibytes = count(sum(after, "eyas_graph_memory_bytes") / 2 ** 20);
  put("graphs", phases.length ? `Captured graphs: ${counted}, in ${seconds} s and ${mebibytes} MiB.` : "No captured graphs.");
  const step = quantile(0.5, buckets(before, after, "eyas_step_gpu_seconds"));
  const gap = quantile(0.5, buckets(before, after, "eyas_step_host_gap_seconds"));
  const waited = gap === undefined ? "" : `, the gap before it ${duration(gap)}`;
  put("steps", step === undefined ? "" : `A step takes ${duration(step)}${waited} (medians, last minute).`);
}

function audit(samples) {
  const of = (outcome) => sum(samples, "eyas_audits_total", { outcome }) ?? 0;
  if (!of("scored") && !of("skipped") && !of("failed")) {
    put("audit", "No output was audited.");
    return;
  }
  const tokens = count(sum(samples, "eyas_audit_tokens_total"));
  const wrong = count(sum(samples, "eyas_audit_mismatches_total"));
  put("audit", `Audit: ${tokens} tokens of ${count(of("scored"))} requests scored again, ${wrong} mismatches; ${count(of("skipped"))} audits skipped, ${count(of("failed"))} failed.`);
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
  const actions = "eyas_nan_guard_actions_total";
  // Bad is what a client saw, or what needs a hand; a mended trip is neither
  const shown = [
    ["eyas_nan_guard_trips_total", "guard trips", false, {}],
    [actions, "of them mended by a retry", false, { action: "retried" }],
    [actions, "of them failed requests", true, { action: "failed" }],
    ["eyas_nan_guard_pages_scrubbed_total", "pages scrubbed", false, {}],
    ["eyas_graph_contract_violations_total", "contract violations", true, {}],
    ["eyas_graphs_disabled", "graphs turned off now", true, {}],
    ["eyas_audit_mismatches_total", "audit mismatches", true, {}],
  ].filter(([name]) => samples.has(name));
  const errors = sum(samples, "eyas_requests_total", { outcome: "error" }) ?? 0;
  const rows = shown.map(([name, label, bad, labels]) => ({ label, value: sum(samples, name, labels) ?? 0, bad }));
  rows.push({ label: "choices ended by an error", value: errors, bad: true });
  bars(document.getElementById("guards"), rows.map((row) => ({ ...row, of: row.value, text: count(row.value) })));
  const mended = sum(samples, actions, { action: "retried" }) ?? 0;
  const failed = sum(samples, actions, { action: "failed" }) ?? 0;
  const other = ["eyas_graph_contract_violations_total", "eyas_graphs_disabled", "eyas_audit_mismatches_total"];
  const bad = failed + other.reduce((all, name) => all + (sum(samples, name) ?? 0), 0);
  put("guard", bad ? count(bad) : mended ? "mended" : "quiet");
  document.getElementById("guard").className = bad ? "bad" : "";
  const story = `${count(failed)} failed, ${count(mended)} mended since the start`;
  put("guard-more", bad || mended ? story : "nothing since the start");
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
  graphs(old.samples, samples);
  memory(samples);
  guard(samples);
  audit(samples);
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
