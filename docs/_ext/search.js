// Search results: pages that answer before the API, and both before tables and the changelog.
const PARTS = {start: 30, how_to: 30, reference: 25, understand: 20, api: 0, notebooks: 0};
PARTS["reference/errors"] = PARTS["reference/terms"] = 35;
PARTS["understand/meaning"] = 30;

var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (PARTS[docname] ?? PARTS[docname.split("/")[0]] ?? (docname.includes("/") ? -30 : -60)),
  objNameMatch: 60,  // the exact name of a function is what was meant
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 40,
};

// What a word is worth on a page, where it is found whole, or else as a part of a word.
const WEIGHTS = {title: 45, words: 40, heading: 30, text: 10, absent: -25};
const PART = 0.3;

// Names are searched by their words, too: MixedPrecision, grad_scaler.
const splitWords = splitQuery;
splitQuery = (text) =>
  splitWords(text).flatMap((word) => [word, ...word.split(/_|(?<=[a-z])(?=[A-Z])/)]);

// Pages by the mean weight of the words of a query, rare words counting more; no page needs all.
Search.performTermsSearch = (words) => {
  const {terms, titleterms, titles, alltitles, docnames, filenames} = Search._index;
  const stemmer = new Stemmer();
  const stems = (text) => splitQuery(text).map((word) => stemmer.stemWord(word.toLowerCase()));
  const phrases = Object.entries(WORDS).flatMap(([place, text]) => {
    const page = docnames.indexOf(place.split("#")[0]);
    const anchor = place.match(/#.*|$/)[0];
    return text.trim().split(/,\s*/).map((phrase) => ({page, anchor, words: stems(phrase)}));
  });

  const scores = docnames.map(() => 0);
  const hits = docnames.map(() => false);
  let total = 0;
  for (const word of words) {
    const weights = new Map();
    const raise = (page, weight) => weights.set(page, Math.max(weight, weights.get(page) ?? 0));
    const look = (matches, factor) => {
      for (const [index, weight] of [[terms, WEIGHTS.text], [titleterms, WEIGHTS.heading]])
        for (const key of Object.keys(index).filter(matches))
          [index[key]].flat().forEach((page) => raise(page, weight * factor));
      titles.forEach((title, page) =>
        stems(title).some(matches) && raise(page, WEIGHTS.title * factor));
      for (const phrase of phrases)
        if (phrase.words.some(matches)) raise(phrase.page, WEIGHTS.words * factor);
    };
    look((key) => key === word, 1);
    if (!weights.size && word.length > 2) look((key) => key.includes(word), PART);
    if (!weights.size) continue;  // no page has the word
    const rarity = Math.log(1 + docnames.length / weights.size);
    total += rarity;
    docnames.forEach((_, page) => (scores[page] += rarity * (weights.get(page) ?? WEIGHTS.absent)));
    weights.forEach((_, page) => (hits[page] = true));
  }

  const result = (page, anchor, score) => {
    const [heading] = Object.entries(alltitles).find(([, places]) =>
      places.some(([at, id]) => at === page && anchor === `#${id}`)) ?? [];
    const title = heading ? `${titles[page]} > ${heading}` : titles[page];
    return [docnames[page], title, anchor, null, score, filenames[page], "text"];
  };
  const results = [];
  for (const phrase of phrases) {  // all words of the query, in any order
    const kept = phrase.words.filter((word) => !stopwords.has(word));
    if (words.size && [...words].every((word) => kept.includes(word)))
      results.push(result(phrase.page, phrase.anchor, 60 + 40 * words.size / new Set(kept).size));
  }
  const least = Math.max(...scores) - 90 * total;
  docnames.forEach((_, page) =>
    hits[page] && scores[page] > least && results.push(result(page, "", scores[page] / total)));
  return results;
};

// Below a result stand the words of the page beside those of the query, not its frame.
Search.htmlToText = (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll("h1, .headerlink, script, style").forEach((element) => element.remove());
  const section = /^#[\w-]+$/.test(anchor) && page.querySelector(`article ${anchor}`);
  return (section || page.querySelector("article")).textContent;
};

// What users of other libraries type, by the page or the section that answers it.
const WORDS = {
  "start/install": `
    pip install, installation, requirements, setup, download, cuda, conda, docker, GPU wheels`,
  "start/first_run": `
    multi gpu same script, same script on several gpus,
    fake devices, virtual devices, simulate devices, xla_force_host_platform_device_count, laptop,
    quickstart, tutorial, getting started, hello world, example, usage, training loop,
    Zero example, donate, min_shard_size`,
  "start/first_run#create-train-look": `
    which parameters are sharded, describe, generate text, sampling, eval step, evaluation,
    validation, inference, predict, test loss`,
  "start/first_run#what-a-step-takes": `
    train_step arguments, has_aux, auxiliary outputs, metrics`,
  "start/your_script": `
    migrate, port my script, convert script, pytorch to jax, pmap`,
  "start/your_script#keras": `
    model.compile, callbacks, keras, model.fit, keras fit`,
  "start/your_script#flax-linen": `
    TrainState, flax example, linen example`,
  "start/your_script#optax-also-with-haiku": `
    haiku, optax example, custom training loop`,
  "start/your_script#flax-nnx": `
    nnx example`,
  "start/your_script#equinox": `
    equinox example`,
  "start/choosing": `
    supported optimizers, list of optimizers, best optimizer, adamw vs adafactor, came vs adamw,
    adafactor vs came, which optimizer should I choose, choosing an optimizer, speed vs adamw,
    memory and speed compared to adamw, step time, optimizer time, which stage, which zero stage, zero 1 vs zero 2,
    recommended settings, defaults, learning rate warmup, warm-up steps`,
  "start/beside_others": `
    deepspeed vs, fsdp vs, alternatives, comparison with pytorch, compared to torchao, why not qwix`,
  "how_to/few_bit_matmuls": `
    fp8 training, fp8 matmul, int8 training, int8 matmul, quantized training, nvfp4, mxfp8, qat`,
  "how_to/few_bit_matmuls#dtypes-and-devices": `
    fp8 activations dtype, fp8 master weights, fp8 on a100, fp8 on cpu, int8 on a100, fp8 on tpu,
    unsupported hardware`,
  "how_to/fit_7b": `
    bigger batch on one gpu, 24GB, zero on a single device,
    single gpu, one gpu, fit llama 7b, 70b, 13b, large model, llm, fine-tune 7b, LOMO, GaLore,
    optimizer in backward, fused backward, update in backward, streaming layers, scan over layers`,
  "how_to/let_it_choose": `
    vision transformer, vit, diffusion, autotune, autotuning, auto sharding, automatic,
    best configuration, search plans, parallelism strategy, auto parallel, fastest plan`,
  "how_to/plan": `
    number of parameters, model size, how much memory, memory usage, memory estimator,
    estimate memory, memory calculator, vram, which gpu, how many gpus, how many devices,
    memory requirements, dry run, ahead of time compile, aot`,
  "how_to/plan#audit-a-step": `
    profile, profiler, memory profile, MFU, throughput, tokens per second, audit, hlo,
    debug memory`,
  "how_to/plan#find-the-largest-batch": `
    largest batch size, maximum batch size, batch size finder, auto batch size,
    batch size too large`,
  "how_to/eight_bits": `
    adam 8bit, 8bit adam, 8bit optimizer, adamw8bit, int8 optimizer, quantized optimizer,
    quantized state, optimizer quantization, 4bit optimizer, fp8 optimizer, lion,
    low precision optimizer, bytes saved, memory saved, optimizer memory, block size, blocksize,
    min_8bit_size, min_size`,
  "how_to/eight_bits#a-float32-run-in-8-bits-and-back": `
    convert checkpoint to 8 bit, convert existing checkpoint, float32 checkpoint to 8 bit,
    convert optimizer state`,
  "how_to/eight_bits#coming-from-bitsandbytes": `
    bitsandbytes, bnb`,
  "how_to/mixed_precision": `
    amp, autocast, bf16, half precision, bf16 training, param dtype, compute dtype, reduce dtype,
    jmp`,
  "how_to/mixed_precision#bfloat16-parameters": `
    master weights, bf16 params master weights, fp32 master weights, bf16 parameters,
    stochastic rounding, pure bf16`,
  "how_to/mixed_precision#float16": `
    grad scaler, fp16, loss scaling, loss scale, dynamic loss scale, fp16 loss scaling,
    GradScaler, overflow, underflow`,
  "how_to/accumulate": `
    gradient accumulation, accumulation steps, grad accum, micro batch, microbatch, microbatches,
    MultiSteps, effective batch size, global batch size, train_micro_batch_size_per_gpu,
    batch size too large`,
  "how_to/accumulate#masked-means": `
    masked mean, masked loss, loss mask, padding tokens, normalize by tokens, token count,
    gradient accumulation bug, padded batch microbatches`,
  "how_to/stage_3": `
    zero 3, zero3, zero stage 3, fsdp, full shard, fully sharded, fully sharded data parallel,
    shard parameters, shard model, parameter sharding, weight sharding, auto wrap, wrap policy,
    gathered_blocks, reshard after forward, gather layers`,
  "how_to/recompute": `
    activation checkpointing, gradient checkpointing, remat, rematerialization, checkpoint policy,
    remat policy, activation memory, nn.remat, jax.checkpoint, save_only_these_names,
    activation offload, recomputation`,
  "how_to/offload": `
    DeepSpeedCPUAdam, cpu adam,
    cpu offload, cpu offloading, optimizer offload, offload optimizer, host offload, zero offload,
    zero infinity, nvme, pinned host, host memory`,
  "how_to/adamw_to_came": `
    came hyperparameters, came learning rate, came settings, tune came, switch from adamw, betas,
    b2, b3, warmup`,
  "how_to/muon": `
    muon, multiple optimizers, shampoo, soap, newton schulz, orthogonalize,
    weight_dimension_numbers, MuonDimensionNumbers, parameter groups, param groups`,
  "how_to/masks": `
    weight decay mask, no decay on bias, no_decay, exclude bias from weight decay,
    layernorm weight decay, decay mask`,
  "how_to/freeze": `
    regular expression of parameters, regex, forms, freeze, freeze layers, frozen parameters, lora, qlora, nf4, bitsandbytes, pruning, peft, adapters, finetune, fine-
                tuning, trainable, requires_grad, stop gradient, set_to_zero`,
  "how_to/ema": `
    bfloat16 ema, ema in float32, ema, exponential moving average, polyak averaging, model averaging, averaged weights,
    schedule free, swa`,
  "how_to/two_models": `
    distillation, teacher student, gan, generator discriminator, dpo, rlhf, reference model,
    multiple models, frozen teacher`,
  "how_to/random_keys": `
    dropout, rng, prng, random seed, seed, deterministic, reproducible, reproducibility`,
  "how_to/log#evaluate-on-a-last-batch-of-fewer-rows": `
    last batch, drop last, pad batch, padding, uneven batch, evaluation, validation set`,
  "how_to/log": `
    wandb, tensorboard, mlflow, logging, metrics, gradient norm, grad norm, global norm,
    learning rate schedule, lr scheduler, learning rate scheduler, cosine decay,
    current learning rate, change learning rate, inject_hyperparams, progress bar, clip gradients,
    max_grad_norm`,
  "how_to/large_batches": `
    lars, lamb, linear scaling, scale learning rate, square root scaling, critical batch size,
    gradient noise scale, large batch training`,
  "how_to/large_batches#learning-rates-by-layer": `
    parameter groups, param groups, multi_transform, optax.partition, different learning rates,
    different optimizer for embeddings,
    learning rate per layer, learning rates by layer, layer-wise learning rate decay,
    layerwise lr decay, llrd, discriminative fine-tuning`,
  "how_to/resume": `
    best checkpoint, keep best, early stopping, gcsfuse, gs bucket, s3, gcs bucket,
    checkpoint interval, how often to checkpoint, checkpoint every n steps, save, restart, resume,
    save checkpoint, resume training, continue training, orbax, CheckpointManager, save model,
    model.save, save state, state_dict, distributed checkpoint, elastic, async checkpoint`,
  "how_to/resume#resume-on-another-machine-or-at-another-stage": `
    load, restore, load checkpoint, restore checkpoint, resume on fewer devices,
    other number of devices, change number of gpus, reshard checkpoint, universal checkpoint`,
  "how_to/export": `
    safetensors, full state dict, consolidate, zero_to_fp32, gather parameters, export model,
    serve, save parameters`,
  "how_to/export#load": `
    pretrained weights, load pretrained, hugging face, huggingface, from_pretrained, torch import,
    import torch weights, convert weights`,
  "how_to/linen": `
    flax linen, logical axes, logical axis rules, with_logical_partitioning, flax examples,
    nn.scan, nn.Module`,
  "how_to/nnx": `
    flax nnx, nnx.Optimizer, nnx.jit, nnx model`,
  "how_to/equinox": `
    equinox, eqx, filter_jit, eqx.Module, pytree model`,
  "how_to/mesh": `
    mesh, existing mesh, my own mesh, custom mesh, 2d mesh, mesh axes, several axes,
    multiple axes, axis names, axis, data and tensor axes, data and model axes, tensor parallel,
    tensor parallelism, tp, model parallel, model parallelism, 2d sharding, 3d parallelism,
    param_specs, PartitionSpec, NamedSharding, device mesh, device_mesh, which axes does Zero take`,
  "how_to/mesh#hybrid-sharding-several-slices-or-nodes": `
    hsdp, hybrid shard, hybrid sharding, multislice, replica_axis, hpz, mics, ddp inside node`,
  "how_to/without_zero": `
    custom train step, own step, own training loop, pjit, jax.jit, value_and_grad,
    apply_gradients, apply_updates, manual step, without zero, optimizer state sharding,
    state_shardings, shard optimizer state, out_shardings`,
  "how_to/clusters": `
    multi host, multihost, multi node, multinode, multi process, jax.distributed, several gpus,
    multiple gpus`,
  "how_to/clusters#data-of-many-hosts": `
    data loader, dataloader, tf.data, grain, input pipeline, dataset, tfds, data loading,
    shard data, feed data, per host batch`,
  "how_to/clusters#when-a-process-is-lost": `
    preemption, preemptible, spot instances, sigterm, requeue, hang, timeout`,
  "how_to/clusters#start-it-on-a-cluster": `
    slurm, sbatch, srun, tpu pod, kubernetes, k8s, mpi, gke, cluster, launch, torchrun, xla flags,
    overlap communication, prefetch`,
  "how_to/lost_machines": `
    goodput, emergency checkpoint, lost time, mean time between failures,
    fault tolerance, node failure, machine failure, lost node, in-memory checkpoint,
    peer checkpoints, restart after failure, gemini, elastic training`,
  "how_to/compress": `
    gradient compression, compress gradients, communication hook, powersgd, top-k, topk, qsgd,
    1-bit adam, quantized gradients, sparse gradients, quantized allreduce, slow network,
    ethernet, bandwidth, error feedback`,
  "how_to/compress#does-it-pay": `
    does compression pay, when to compress gradients, which sync, is compression faster,
    bandwidth gbit, 10 gigabit, infiniband`,
  "how_to/compress#embedding-tables": `
    embedding table, large embeddings, sparse embedding, vocabulary, recommender, lazy adam`,
  "how_to/local_steps": `
    diloco, local sgd, post-local sgd, streaming diloco, federated, federated averaging,
    infrequent synchronization, several data centers, two data centers`,
  "how_to/check": `
    check machine, self test, diagnose, verify installation, does it work on my gpu, sanity check`,
  "how_to/pipelines": `
    PipelineModule, pipeline module, LayerSpec,
    tied embeddings, pipeline parallel, pipeline parallelism, gpipe, 1f1b, pp, model stages,
    zero bubble, split layers over devices`,
  "understand/zero": `
    memory of each stage, communication cost of zero, zero, zero 1, zero 2,
    zero redundancy optimizer, data parallel, optimizer state sharding, distributed optimizer,
    what is zero, reduce scatter, ddp`,
  "understand/meaning": `
    batch norm, batchnorm, sync batch norm, batch statistics, batch_stats, mutable, running mean,
    contrastive loss, infonce, clip loss, masked loss, padding tokens, loss mask, token weights,
    ignore index, variable length, loss differs on several devices, wrong loss, check loss,
    wrong gradients, load balancing loss, global view, per device loss, shard_map, gspmd,
    global batch`,
  "understand/meaning#model-state": `
    model state`,
  "understand/meaning#your-own-mesh-and-annotations": `
    with_sharding_constraint, sharding constraint, annotations, sequence parallel,
    context parallel`,
  "understand/factored_moments": `
    optax.adafactor, adafactor arguments, confidence-guided, huggingface adafactor,
    transformers adafactor, adafactor, factored second moment, factoring, came algorithm,
    what is came, sublinear memory`,
  "understand/evidence": `
    adafactor results, loss curves, comparison of optimizers, convergence, quality,
    does came work, accuracy`,
  "understand/low_bits": `
    does 8 bit hurt, 8 bit loss, quantization error, dynamic quantization, block-
                wise quantization`,
  "understand/wire": `
    communication volume, wire bytes, compression quality, powersgd loss`,
  "understand/claims": `
    tested on, is it tested, production ready, gpu support, h100, a100`,
  "understand/claims#what-is-not-known": `
    vs deepspeed, compared with deepspeed, deepspeed vs, benchmarks vs deepspeed, limitations,
    known issues, tpu support, amd`,
  "understand/asynchronous": `
    pipedream, asynchronous pipeline, stale gradients, delayed gradients`,
  "reference/errors": `
    cuda out of memory, gpu out of memory, hbm, oom, out of memory, resource exhausted, error,
    faq, troubleshooting, donated buffers, array deleted, buffer donated, debug, disable_jit,
    batch size too large`,
  "reference/errors#questions": `
    nan, nan loss, inf, loss is nan, skip step, slow, slow compile, compile time, recompile,
    recompilation, compilation cache, second step slow, why is my parameter not sharded,
    not divisible, same result on any number of devices, macos, windows, rocm, amd gpu, tunix,
    bytes of embeddings, clip gradients, gradient clipping,
    max_grad_norm, clip_grad_norm`,
  "reference/survey": `
    checkmate, revolve, rotor, dtr, monet, rockmate, vdnn, tflms, autoswap, swapadvisor, l2l, pofo,
    capuchin, gradzip, pipe-torch, hetpipe, dapple, varuna, terapipe, flexflow, mesh-tensorflow,
    survey, zero-infinity, sm3`,
  "reference/terms": `
    ds_config, ds_config.json, deepspeed config, deepspeed.initialize, per_device_batch_size,
    allgather_bucket_size, contiguous_gradients, bucket size,
    aqt, qwix, quantized matmul, int8 matmul, fp8 matmul,
    deepspeed, fsdp, megatron, maxtext, torchtitan, glossary, terminology, fairscale, colossalai,
    levanter, t5x, zero++, cpu offload`,
  "reference/terms#:~:text=mixture of experts": `
    megablox, megablocks, grouped matmul,
    moe, mixture of experts, expert parallel`,
  "reference/terms#:~:text=context parallelism": `
    context parallel, ring attention, sequence parallel`,
  "reference/dtypes": `
    dtype, dtypes, int8, fp8, float8, 4 bit, gather in int8`,
  "reference/dtypes#bytes-of-state": `
    bytes per parameter, memory table`,
  "reference/devices": `
    nvlink, infiniband, pcie, devices, gpu list, which gpu, supported gpus, tpu types, v5e, h100,
    a100, b200, peak flops, bandwidth`,
  "reference/versions": `
    jax, jax 0.10, jax 0.11, jax 0.12, version, python version, jax version, compatibility,
    supported versions, upgrade, flax version`,
  "reference/cite": `
    cite, citation, citing, bibtex, license, apache, paper, papers, authors`,
  "reference/schedules": `
    pipeline schedules, bubble`,
  "api/command_line": `
    command line, command line options, cli`,
  "api/sharding": `
    api reference, api docs, Zero arguments`,
  "notebooks/quickstart": `
    notebook, notebooks, colab, jupyter`,
  "CHANGELOG": `
    changelog, release notes, what's new, breaking changes`,
  "benchmarks/README": `
    benchmarks, speed, performance, step time, reproduce`,
};
