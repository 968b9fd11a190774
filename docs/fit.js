// "Will it fit?": the memory of a loss step, by the way to write it. Loaded by fit.md, with nothing from elsewhere.
//
// The formulas are the large terms of what `logitless plan` predicts: matrices, and what a memory budget holds. A test
// holds them to `logitless.estimate` within 5 %, in a browser and, read as Python, without one.

// Of a model: hidden size, vocabulary, whether its logits have a softcap.
const MODELS = {
  "qwen2.5-0.5b": [896, 151936, 0],
  "qwen2.5-1.5b": [1536, 151936, 0],
  "qwen2.5-3b": [2048, 151936, 0],
  "qwen2.5-7b": [3584, 152064, 0],
  "qwen2.5-14b": [5120, 152064, 0],
  "qwen2.5-32b": [5120, 152064, 0],
  "qwen2.5-72b": [8192, 152064, 0],
  "qwen3-0.6b": [1024, 151936, 0],
  "qwen3-1.7b": [2048, 151936, 0],
  "qwen3-4b": [2560, 151936, 0],
  "qwen3-8b": [4096, 151936, 0],
  "qwen3-14b": [5120, 151936, 0],
  "qwen3-32b": [5120, 151936, 0],
  "qwen3-30b-a3b": [2048, 151936, 0],
  "qwen3-235b-a22b": [4096, 151936, 0],
  "qwen3.5-35b-a3b": [2048, 248320, 0],
  "llama3.2-1b": [2048, 128256, 0],
  "llama3.2-3b": [3072, 128256, 0],
  "llama3.1-8b": [4096, 128256, 0],
  "llama3.1-70b": [8192, 128256, 0],
  "llama3.1-405b": [16384, 128256, 0],
  "gemma2-2b": [2304, 256000, 1],
  "gemma2-9b": [3584, 256000, 1],
  "gemma2-27b": [4608, 256000, 1],
  "gemma3-1b": [1152, 262144, 0],
  "gemma3-4b": [2560, 262208, 0],
  "gemma3-12b": [3840, 262208, 0],
  "gemma3-27b": [5376, 262208, 0],
  "glm4-9b": [4096, 151552, 0],
  "glm4-32b": [6144, 151552, 0],
  "glm4.5-air": [4096, 151552, 0],
  "glm4.5-355b": [5120, 151552, 0],
  "deepseek-v2-lite": [2048, 102400, 0],
  "deepseek-v2-236b": [5120, 102400, 0],
  "deepseek-v3-671b": [7168, 129280, 0],
}

// Of a card: memory in MiB, columns of logits that fill it, whether a product of its own ends in the softmax.
const CARDS = {
  "a100-40g": [40960, 3456, 0],
  "a100-80g": [81920, 3456, 0],
  "h100-80g": [81559, 4224, 1],
  "h200-141g": [143771, 4224, 1],
  "b200-180g": [183359, 4736, 0],
  "l40s-48g": [46068, 9088, 0],
  "rtx4090-24g": [24564, 4096, 0],
  "rtx5090-32g": [32607, 10880, 0],
}

const { ceil, floor, max, min } = Math
const pick = (which, yes, no) => (which ? yes : no)

// formulas: tokens T, scored rows R, vocabulary V and hidden size D of one rank; all operands in 16 bits
function plainTorch(T, R, V, D, entropy) {
  return max(pick(entropy, 20, 14) * T * V, 2 * T * V + 2 * D * (T + V))
}

function slimeStyle(T, R, V, D, entropy) {
  return max(pick(entropy, 12, 10) * T * V, 6 * T * V + 2 * D * (T + V))
}

function fromLogits(T, R, V, D) {
  return 4 * T * V + 2 * D * (T + V)
}

function overLogits(T, R, V, D) {
  return 2 * T * V + 2 * D * (T + V)
}

// As many columns as there are, or whole multiples of what fills the card.
function whole(columns, V, filling) {
  const step = pick(columns >= filling, filling, pick(columns >= 128, 128, 1))
  return pick(columns >= V, V, floor(columns / step) * step)
}

// logprobs of Logits under 256 MiB: a tile of logits at a time, and the gradients added up beside it.
function fromHidden(T, R, V, D, filling, fused) {
  const budget = 256 * 2 ** 20
  const few = min(R, 16384)
  const block = pick(R >= V, max(1, min(few, floor(budget / 4 / min(256, V)))), few)
  const rows = min(2048, block)
  const column = 4 * rows + 2 * block
  const apart = whole(min(floor(budget / column), floor(4096 * filling / rows)), V, filling)
  const wide = min(V, floor(apart * column / (2 * block)))
  const columns = pick(fused, pick(wide >= V, V, wide - wide % 128), apart)
  const held = 2 * R * D + 48 * R + columns * pick(fused, 2 * block, column)
  const tall = min(R, 4096)
  const tile = 4 * tall * whole(min(floor(budget / 4 / tall), floor(8192 * filling / tall)), V, filling)
  const forward = 2 * R * D + 48 * R + pick(fused, 0, tile)
  const slabs = max(held + 4 * R * D + 2 * V * D + pick(R > block, 4 * columns * D, 0), 8 * R * D + 2 * V * D + 48 * R)
  const blocks = max(held + 4 * V * D + 2 * R * D + 4 * block * D, 4 * R * D + 6 * V * D + 48 * R)
  return max(forward, pick(R < V, slabs, blocks), 4 * R * D + 2 * D * (T + V) + 48 * R)
}

// Rows of chunks that are about as long, of at most so many rows.
function chunk(R, most) {
  const rows = ceil(R / ceil(R / most))
  const filled = ceil(rows / 128) * 128
  return min(R, pick(filled <= most, filled, pick(most >= 128, most - most % 128, rows)))
}

// Tiles of 128 rows whose sums of dX exist in parts on Hopper's cards, with the sum of the parts: rank and number in one.
function inParts(blocks, across, programs, whole, parts) {
  const rest = (blocks - whole) * across * parts
  const time = ceil(whole * across / programs) + ceil(rest / programs) / parts + 0.01 * parts + pick(whole * rest, 0.02, 0)
  const fits = pick(rest <= 4 * programs, pick(whole < blocks, 1, 0), 0)
  return pick(fits, floor(1e4 * time), 1e8) * 1e6 + (parts + 1) * (blocks - whole)
}

// Bytes of those sums for a chunk of rows; none where rows fill the card, or the product is small.
function sumsOf(rows, V, D, programs) {
  const blocks = ceil(rows / 128)
  const across = ceil(D / 256)
  const idle = pick(blocks * across < 0.9 * programs * ceil(blocks * across / programs), 1, 0)
  const taken = pick(rows * V * D >= 2 ** 37, max(idle, pick(V % 8, 1, 0)), 0)
  const full = floor(floor(blocks * across / programs) * programs / across)
  const none = floor(1e4 * (ceil(blocks * across / programs) + 0.01)) * 1e6
  const two = min(inParts(blocks, across, programs, 0, 2), inParts(blocks, across, programs, full, 2))
  const three = min(inParts(blocks, across, programs, 0, 3), inParts(blocks, across, programs, full, 3))
  const four = min(inParts(blocks, across, programs, 0, 4), inParts(blocks, across, programs, full, 4))
  const five = min(inParts(blocks, across, programs, 0, 5), inParts(blocks, across, programs, full, 5))
  const six = min(inParts(blocks, across, programs, 0, 6), inParts(blocks, across, programs, full, 6))
  return taken * 4 * 128 * D * (min(none, two, three, four, five, six) % 1e6)
}

// policy_loss of Logits under 1 GiB: chunks of logits or of 16-bit exponentials, or two passes, whichever is fastest by
// what work costs on an H200. Rows of the last chunk are copied, unless the device was asked which have a gradient.
function ofLoss(T, R, V, D, filling, fused, capped) {
  const budget = 2 ** 30
  const product = 2 * R * V * D / 685e12
  const adding = 8 * V * D / 2.8e12
  const plain = chunk(R, max(1, floor(budget / 4 / V)))
  const seconds = 3 * product + 10 * R * V / 4e12 + ceil(R / plain) * adding
  const rows = min(2048, R)
  const columns = whole(min(floor(budget / 32 / rows), floor(2048 * filling / rows)), V, filling)
  const row = 2 * V + 4 * ceil(V / pick(fused, 128, columns))
  const short = chunk(R, max(1, floor((budget - 4 * rows * columns) / row)))
  const tiles = ceil(R / short) * ceil(short / 2048) * ceil(V / filling)
  const filling_up = pick(fused, product + 0.1e-12 * R * V, max(product + 6 * R * V / 4e12 + tiles * 10e-6, tiles * 90e-6))
  const others = 2 * product + 4 * R * V / 4e12 + ceil(R / short) * adding + filling_up
  const exponentials = pick(R > plain, 1, 0) * pick(capped, 0, 1) * pick(others < 0.97 * seconds, 1, 0)
  const held = pick(exponentials, short * row + pick(fused, 0, 4 * rows * columns), 4 * plain * V)
  const launches = ceil(R * V / min(8192 * filling, budget / 16)) + ceil(R * V / min(4096 * filling, budget / 32))
  const apart = 4 * product + 10 * R * V / 4e12 + launches * 10e-6
  const two = pick(fused, 4 * product + 0.2e-12 * R * V, apart)
  const step = pick(exponentials, short, plain)
  const sums = pick(fused, sumsOf(step, V, D, filling / 32), 0)
  const asked = pick(R > step, 0, pick(4 * R * V * D > 3e-3 * 685e12, 1, 0))
  const copied = pick(asked, 0, 2 * D * (R - (ceil(R / step) - 1) * step))
  const one = max(4 * R * D + 4 * V * D + held + max(sums, copied), 4 * R * D + 6 * V * D + 2 * T * D) + 20 * R
  return pick(two < 0.97 * pick(exponentials, others, seconds), fromHidden(T, R, V, D, filling, fused), one)
}
// end of formulas

const WAYS = [
  { name: "plain torch", title: "plain torch", peak: (s) => plainTorch(s.T, s.R, s.V, s.D, s.entropy),
    line: () => "logp = torch.log_softmax(logits.float(), -1)  # what frameworks do" },
  { name: "slime-style", title: "slime by itself", peak: (s) => slimeStyle(s.T, s.R, s.V, s.D, s.entropy),
    line: () => "# what slime does by itself" },
  { name: "logprobs", title: "logprobs of a tensor", peak: (s) => fromLogits(s.T, s.R, s.V, s.D),
    line: (s) => `out = ll.logprobs(${given(s)}, rows, entropy="${s.entropy ? "grad" : "value"}")` },
  { name: "logprobs, overwrite", title: "... overwriting it", peak: (s) => overLogits(s.T, s.R, s.V, s.D),
    line: (s) => `out = ll.logprobs(${given(s, "overwrite=True")}, rows, entropy="${s.entropy ? "grad" : "value"}")` },
  { name: "logprobs of Logits", title: "logprobs of Logits", ours: true, peak: (s) => fromHidden(s.T, s.R, s.V, s.D, s.filling, s.fused),
    line: (s) => `out = ll.logprobs(${linear(s)}, rows, entropy="${s.entropy ? "grad" : "value"}")` },
  { name: "policy_loss of Logits", title: "policy_loss of Logits", ours: true, peak: (s) => ofLoss(s.T, s.R, s.V, s.D, s.filling, s.fused, s.capped),
    line: (s) => `loss, metrics = ll.policy_loss(${linear(s)}, rows, objective, ...)` },
]

function given(s, ...options) {
  const all = [...(s.tp > 1 ? ["shard=shard"] : []), ...options]
  return all.length ? `ll.Logits.given(logits, ${all.join(", ")})` : "logits"
}

function linear(s) {
  return `ll.Logits(hidden, weight${s.tp > 1 ? ", shard=shard" : ""})`
}

// The sizes of one rank, from what a reader types.
function sizes(model, card, tokens, response, tp, cp, entropy) {
  const [D, vocab, capped] = MODELS[model]
  const [memory, filling, fused] = CARDS[card]
  const T = ceil(tokens / cp)
  return { T, R: max(1, Math.round(T * response)), V: ceil(vocab / tp), D, tp, cp, entropy, capped, memory, filling, fused }
}

function mostTokens(way, asked, free) {
  const fits = (units) => way.peak(sizes(asked.model, asked.card, 256 * units, asked.response, asked.tp, asked.cp, asked.entropy)) <= free
  let low = 0, high = 1
  while (fits(high) && high < 2 ** 24) [low, high] = [high, 2 * high]
  while (high - low > 1) {
    const middle = floor((low + high) / 2)
    if (fits(middle)) low = middle
    else high = middle
  }
  return 256 * low
}

// "64k" is a number, of 1024.
function count(text) {
  const found = /^([\d.]+)\s*([km]?)$/i.exec(text.trim().replaceAll(/[,_]/g, ""))
  return found ? Number(found[1]) * { "": 1, k: 2 ** 10, m: 2 ** 20 }[found[2].toLowerCase()] : NaN
}

function gib(bytes) {
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`
}

function show(form) {
  const value = (name) => form.elements[name].value
  const number = (name, least) => max(least, Number(value(name)) || least)
  const asked = { model: value("model"), card: value("card"), tokens: count(value("tokens")), tp: number("tp", 1), cp: number("cp", 1) }
  Object.assign(asked, { response: min(1, max(0.01, Number(value("response")) / 100)), entropy: form.elements.entropy.checked })
  const answer = document.querySelector("#fit-answer")
  if (!(asked.tokens >= 1)) {
    answer.textContent = `Tokens must be a number such as 65536 or 64k, and is "${value("tokens")}".`
    return
  }
  const s = sizes(asked.model, asked.card, asked.tokens, asked.response, asked.tp, asked.cp, asked.entropy)
  const free = max(0, s.memory * 2 ** 20 - number("used", 0) * 2 ** 30)
  const peaks = WAYS.map((way) => way.peak(s))
  const scale = max(free, ...peaks)
  const chosen = WAYS.findIndex((way) => way.name === value("way"))
  WAYS.forEach((way, i) => {
    const row = document.querySelectorAll("#fit-bars .row")[i]
    row.classList.toggle("chosen", i === chosen)
    row.classList.toggle("over", peaks[i] > free)
    row.querySelector(".bar").style.width = `${max(0.3, 100 * peaks[i] / scale)}%`
    row.querySelector(".track").style.setProperty("--card", `${100 * free / scale}%`)
    row.querySelector(".peak").textContent = gib(peaks[i])
    row.querySelector(".most").textContent = mostTokens(way, asked, free).toLocaleString("en")
  })
  const fits = peaks[chosen] <= free
  answer.textContent = `${form.elements.way.selectedOptions[0].text} needs ${gib(peaks[chosen])} of ${gib(free)} free on each rank: it ${fits ? "fits" : "does not fit"}.`
  document.querySelector("#fit-line").textContent = WAYS[chosen].line(s)
}

function start() {
  const form = document.querySelector("#fit")
  if (!form) return
  for (const [name, table, first] of [["model", MODELS, "qwen3-8b"], ["card", CARDS, "h100-80g"]]) {
    form.elements[name].replaceChildren(...Object.keys(table).map((key) => new Option(key, key, key === first, key === first)))
  }
  const bars = document.querySelector("#fit-bars")
  bars.replaceChildren(...WAYS.map((way) => {
    const row = document.createElement("div")
    row.className = way.ours ? "row ours" : "row"
    row.innerHTML = `<span class="name">${way.title}</span>
      <span class="track"><span class="bar"></span></span><span class="peak"></span><span class="most"></span>`
    row.addEventListener("click", () => {
      form.elements.way.value = way.name
      show(form)
    })
    return row
  }))
  form.elements.way.replaceChildren(...WAYS.map((way) => new Option(way.title.replace("...", "logprobs,"), way.name)))
  form.elements.way.value = "policy_loss of Logits"
  form.addEventListener("input", () => show(form))
  form.addEventListener("submit", (event) => event.preventDefault())
  show(form)
}

start()
