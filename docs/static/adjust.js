"use strict";
// The adjustments to the batch size, as adjust_for_batch_size of the five scripts makes them.

const Adjust = {
  EWMA: ["ppo_ewma", "ppg_ewma"],
  PPG: ["ppg", "ppg_ewma"],

  // As Python's round: halves go to the even neighbour.
  round(x) {
    const low = Math.floor(x), rest = x - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  },

  used(script, args) {
    const c = args.reference_num_envs / args.num_envs;
    const by = (name) => (args.no_adjust.includes(name) ? 1 : c);
    const root = args.lr_rule === "linear" ? (x) => x : Math.sqrt;
    const used = { lr: args.learning_rate / root(by("lr")) };
    used.adv_norm_span = Math.max(1, by("adv-norm"));
    used.adv_norm_decay = (used.adv_norm_span - 1) / (used.adv_norm_span + 1);
    used.beta1 = args.adjust_betas === "both" ? 0.9 ** (1 / c) : 0.9;
    used.beta2 = args.adjust_betas !== "none" ? 0.999 ** (1 / c) : 0.999;
    if (Adjust.EWMA.includes(script)) {
      used.prox_com = args.prox_com * by("prox");
      used.prox_decay = used.prox_com / (used.prox_com + 1);
    }
    if (Adjust.PPG.includes(script)) {
      used.n_pi = Math.max(1, Adjust.round(args.n_pi * by("n-pi")));
      used.aux_rollouts = Math.max(Math.min(4, args.aux_rollouts), Adjust.round(args.aux_rollouts / c));
      const size = args.no_adjust.includes("lr") ? 1 : used.aux_rollouts / args.aux_rollouts;
      used.aux_lr = args.aux_learning_rate * root(size);
    }
    return used;
  },

  // The numbers of minibatches that an iteration splits into: of whole rollouts, or of stretches of one.
  evenSplits(envs, steps) {
    const divisors = (n) => [...Array(n).keys()].map((i) => i + 1).filter((m) => n % m === 0);
    return [...divisors(envs), ...divisors(steps).slice(1).map((m) => envs * m)];
  },

  // How many digits show a number to a percent of its distance from 1, but at least 5.
  digits(x) {
    return x > 0.9 && x < 1 ? Math.max(5, Math.ceil(-Math.log10(1 - x)) + 2) : 5;
  },

  // As Python's "{:.5g}".
  show(x, digits = 5) {
    if (x === 0) return "0";
    const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
    if (exponent < -4 || exponent >= digits) {
      const power = String(Math.abs(exponent)).padStart(2, "0");
      return `${Number(mantissa)}e${exponent < 0 ? "-" : "+"}${power}`;
    }
    return String(Number(x.toPrecision(digits)));
  },
};

(() => {
  const form = document.getElementById("adjust");
  if (!form) return;
  const get = (id) => document.getElementById(id);
  const NUMBERS = ["reference-num-envs", "learning-rate", "prox-com", "n-pi", "aux-rollouts", "aux-learning-rate"];
  const WHOLE = ["num-envs", "reference-num-envs", "n-pi", "aux-rollouts"];
  const name = (flag) => flag.replaceAll("-", "_");
  const row = (key) => form.querySelector(`[data-row="${key}"]`);
  const box = (ablation) => form.querySelector(`[data-ablation="${ablation}"]`);
  const has = { prox: Adjust.EWMA, "n-pi": Adjust.PPG };
  const thousands = (x) => (x >= 1 ? Math.round(x).toLocaleString("en-GB") : Adjust.show(x));

  // A field that makes no sense is marked, and counts as its default.
  function number(id) {
    const x = get(id).valueAsNumber, fallback = id === "num-envs" ? 64 : FLAGS.ppg_ewma[name(id)];
    const ok = Number.isFinite(x) && (WHOLE.includes(id) ? x >= 1 && Number.isInteger(x) : x >= 0) && (id !== "num-envs" || x <= 1024);
    get(id).setAttribute("aria-invalid", String(!ok));
    return ok ? x : fallback;
  }

  // Formulas as MathML, with numbers.
  const mn = (x) => `<mn>${typeof x === "number" ? Adjust.show(x) : x}</mn>`;
  const mo = (x) => `<mo>${x}</mo>`;
  const frac = (a, b) => `<mfrac><mrow>${a}</mrow><mrow>${b}</mrow></mfrac>`;
  const sqrt = (a) => `<msqrt>${a}</msqrt>`;
  const math = (text) => `<math><mrow>${text}</mrow></math>`;
  const call = (f, ...parts) => `<mo>${f}</mo>${mo("(")}${parts.join(mo(","))}${mo(")")}`;

  function formulas(args, used) {
    const c = args.reference_num_envs / args.num_envs;
    const kept = (ablation, text) => (args.no_adjust.includes(ablation) ? "not adjusted" : math(text));
    const root = args.lr_rule === "linear" ? (x) => x : sqrt;
    const result = {
      lr: kept("lr", frac(mn(args.learning_rate), root(mn(c)))),
      adv_norm_span: kept("adv-norm", call("max", mn(1), mn(c))),
      adv_norm_decay: math(frac(mn(used.adv_norm_span) + mo("−") + mn(1), mn(used.adv_norm_span) + mo("+") + mn(1))),
      beta1: args.adjust_betas === "both" ? math(`<msup>${mn(0.9)}<mrow>${mn(1)}${mo("/")}${mn(c)}</mrow></msup>`) : "kept",
      beta2: args.adjust_betas !== "none" ? math(`<msup>${mn(0.999)}<mrow>${mn(1)}${mo("/")}${mn(c)}</mrow></msup>`) : "kept",
    };
    if ("prox_com" in used) {
      result.prox_com = kept("prox", mn(args.prox_com) + mo("·") + mn(c));
      result.prox_decay = math(frac(mn(used.prox_com), mn(used.prox_com) + mo("+") + mn(1)));
    }
    if ("n_pi" in used) {
      result.n_pi = kept("n-pi", call("max", mn(1), call("round", mn(args.n_pi) + mo("·") + mn(c))));
      result.aux_rollouts = math(call("max", mn(Math.min(4, args.aux_rollouts)), call("round", mn(args.aux_rollouts) + mo("/") + mn(c))));
      const size = frac(mn(used.aux_rollouts), mn(args.aux_rollouts));
      result.aux_lr = kept("lr", mn(args.aux_learning_rate) + mo("·") + root(size));
    }
    return result;
  }

  function update() {
    const script = get("script").value, flags = FLAGS[script];
    const ablations = [...form.querySelectorAll("[data-ablation]")].map((x) => x.dataset.ablation);
    for (const ablation of ablations) box(ablation).disabled = has[ablation] ? !has[ablation].includes(script) : false;
    const args = { num_envs: number("num-envs"), lr_rule: get("lr-rule").value, adjust_betas: get("adjust-betas").value };
    for (const id of NUMBERS) args[name(id)] = number(id);
    args.no_adjust = ablations.filter((x) => !box(x).checked && !box(x).disabled);
    const atReference = Adjust.used(script, { ...args, num_envs: args.reference_num_envs });
    const used = Adjust.used(script, args), texts = formulas(args, used), c = args.reference_num_envs / args.num_envs;

    get("c-line").innerHTML = math(`<mi>c</mi>${mo("=")}${frac(mn(args.reference_num_envs), mn(args.num_envs))}${mo("=")}${mn(c)}`) +
      (c > 1 ? `: batches are ${Adjust.show(c)} times smaller than the reference.` : c < 1 ? `: batches are ${Adjust.show(1 / c)} times larger than the reference.` : ": the reference itself. Nothing changes.");
    for (const line of form.querySelectorAll("[data-row]")) {
      const key = line.dataset.row, present = key in used;
      line.classList.toggle("absent", !present);
      line.querySelector("[data-cell=formula]").innerHTML = present ? texts[key] : `not in ${script}.py`;
      const show = (x) => (present ? Adjust.show(x, key.startsWith("beta") ? Adjust.digits(x) : 5) : "");
      line.querySelector("[data-cell=stated]").textContent = show(atReference[key]);
      line.querySelector("[data-cell=value]").textContent = show(used[key]);
    }
    for (const text of form.querySelectorAll("[data-lr-rule]")) text.hidden = text.dataset.lrRule !== args.lr_rule;

    const notices = [], stated = flags.epochs || flags.policy_epochs, flag = `--${"epochs" in flags ? "epochs" : "policy-epochs"}`;
    const several = c !== 1 && stated > 1, epochs = several && get("one-epoch").checked ? 1 : stated;
    get("one-epoch-line").hidden = !several;
    get("one-epoch-flag").textContent = `${flag} 1`;
    const fitting = Adjust.evenSplits(args.num_envs, flags.num_steps);
    if (!fitting.includes(flags.num_minibatches)) {
      const near = fitting.sort((a, b) => Math.abs(a - flags.num_minibatches) - Math.abs(b - flags.num_minibatches)).slice(0, 5);
      notices.push(`${args.num_envs} × ${flags.num_steps} frames do not split evenly into ${flags.num_minibatches} minibatches: the script refuses. --num-minibatches ${near.sort((a, b) => a - b).join(", ")} would do.`);
    }
    if (c !== 1) {
      if (several) notices.push(`By itself ${script}.py makes ${stated} epochs. The paper claims invariance for one policy epoch only${epochs > 1 ? `: add ${flag} 1` : ", so the command below asks for one"}.`);
      if (!Adjust.EWMA.includes(script)) notices.push(`No EWMA in ${script}.py. The paper claims invariance for PPO-EWMA and PPG-EWMA.`);
      if (c < 1) notices.push("A larger batch than the reference. The paper claims invariance for small enough ones only.");
    }
    get("notices").replaceChildren(...notices.map((text) => Object.assign(document.createElement("li"), { textContent: text })));

    const sizes = (envs, values) => {
      const iteration = envs * flags.num_steps, minibatch = iteration / flags.num_minibatches;
      const rows = [["an iteration", iteration], ["a minibatch", minibatch]];
      rows.push(["frames behind the advantage statistics", values.adv_norm_span * iteration]);
      if ("prox_com" in values) rows.push(["age of the proximal policy", (values.prox_com * minibatch) / epochs]);
      if ("n_pi" in values) rows.push(["a phase", values.n_pi * iteration]);
      return rows;
    };
    const here = sizes(args.num_envs, used);
    const reference = sizes(args.reference_num_envs, atReference);
    get("sizes").tBodies[0].innerHTML = here.map(([what, x], i) => `<tr><th scope="row">${what}</th><td>${thousands(x)}</td><td>${thousands(reference[i][1])}</td></tr>`).join("");

    const words = ["python", `${script}.py`, "--num-envs", args.num_envs];
    for (const id of NUMBERS) if (name(id) in flags && args[name(id)] !== flags[name(id)]) words.push(`--${id}`, args[name(id)]);
    if (epochs !== stated) words.push(flag, epochs);
    if (args.no_adjust.length) words.push("--no-adjust", ...args.no_adjust);
    if (args.lr_rule !== "sqrt") words.push("--lr-rule", args.lr_rule);
    if (args.adjust_betas !== "none") words.push("--adjust-betas", args.adjust_betas);
    get("command").textContent = words.join(" ");
    get("copied").textContent = "";
  }

  get("num-envs-range").addEventListener("input", (event) => {
    get("num-envs").value = 2 ** event.target.value;
    update();
  });
  get("num-envs").addEventListener("input", () => {
    get("num-envs-range").value = Math.log2(number("num-envs"));
  });
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  get("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(get("command").textContent);
      get("copied").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(get("command"));
      get("copied").textContent = "Selected: copy it with your keyboard.";
    }
  });
  update();
})();
