//! vLLM's documented flags that this engine does not have: accepted where they name what it does anyway, refused by
//! name with the reason otherwise.
//!
//! They are taken off the command line before clap sees it, so that help shows only what acts.

use crate::failure::Failure;

/// A flag of vLLM's.
struct Flag {
    name: &'static str,
    takes: Takes,
    why: &'static str,
}

/// What may follow the flag, and what of it changes nothing.
enum Takes {
    /// Nothing, and having it changes nothing.
    NothingAccepted,
    /// Nothing, and having it asks for something.
    NothingRefused,
    /// A value; these change nothing.
    Value(&'static [&'static str]),
}

const fn accepted(name: &'static str) -> Flag {
    Flag { name, takes: Takes::NothingAccepted, why: "" }
}

const fn refused(name: &'static str, why: &'static str) -> Flag {
    Flag { name, takes: Takes::NothingRefused, why }
}

const fn value(name: &'static str, accepted: &'static [&'static str], why: &'static str) -> Flag {
    Flag { name, takes: Takes::Value(accepted), why }
}

const ONE_PROCESS: &str = "the engine is one process on one node";
const NO_LORA: &str = "adapters are not available";
const NO_MEDIA: &str = "the model reads and writes text only";
const NO_COMPILE: &str = "kernels are written and not generated, so there is nothing to configure";
const NO_CODE: &str = "the engine runs no code from a model";
const FROM_FILE: &str = "the model's own files hold it";
const FILES_ONLY: &str = "secrets come from files: use --api-key-file or --api-key-dir";

const FLAGS: &[Flag] = &[
    // Model
    value("--tokenizer", &[], FROM_FILE),
    value("--tokenizer-mode", &["auto"], FROM_FILE),
    value("--tokenizer-revision", &[], FROM_FILE),
    value("--hf-config-path", &[], FROM_FILE),
    value("--hf-overrides", &["{}"], FROM_FILE),
    value("--hf-token", &[], "secrets come from files: use --token-file"),
    value("--code-revision", &[], NO_CODE),
    value("--load-format", &["auto", "gguf"], "the path tells it: a GGUF file, or a folder with safetensors"),
    value("--dtype", &["auto"], "weights are computed on as the file holds them"),
    value("--convert", &["auto", "none"], "a model is served as what it was trained for"),
    value("--seed", &[], "each request has its own seed"),
    value("--config-format", &["auto"], "the path tells it: a GGUF file, or a folder with config.json"),
    value("--rope-scaling", &[], FROM_FILE),
    value("--rope-theta", &[], FROM_FILE),
    value("--generation-config", &["auto", "vllm"], "defaults are the API's own"),
    value("--override-generation-config", &["{}"], "defaults are the API's own"),
    value("--max-logprobs", &["20"], "a request may ask for up to 20"),
    value("--logits-processors", &[], NO_CODE),
    refused("--trust-remote-code", NO_CODE),
    accepted("--no-trust-remote-code"),
    refused(
        "--disable-sliding-window",
        "windows are computed as the model has them; a --max-model-len within them has the same effect",
    ),
    refused("--enable-prompt-embeds", "prompts are text or token ids"),
    accepted("--no-enable-prompt-embeds"),
    accepted("--enable-sleep-mode"),
    accepted("--no-enable-sleep-mode"),
    refused("--skip-tokenizer-init", "requests are text"),
    // Memory and scheduling
    value(
        "--cpu-offload-gb",
        &["0"],
        "weights are in the memory of the device that computes on them; --n-gpu-layers leaves layers to the CPU",
    ),
    value("--kv-cache-memory", &[], "use --kv-cache-memory-bytes"),
    value("--kv-offloading-size", &[], "the KV cache stays in memory"),
    value("--prefix-caching-hash-algo", &[], "prompts are found by a keyed SipHash of 128 bits, and compared"),
    value("--max-num-partial-prefills", &["1"], "chunks fill what decoding leaves of a step"),
    value("--long-prefill-token-threshold", &["0"], "chunks fill what decoding leaves of a step"),
    value("--num-lookahead-slots", &["0"], "guesses take blocks that are free"),
    value("--preemption-mode", &["recompute"], "preempted sequences are computed again"),
    value("--stream-interval", &["1"], "every token is sent when it is there"),
    value("--num-scheduler-steps", &["1"], "every token is sent when it is there"),
    value("--scheduler-delay-factor", &["0", "0.0"], "a request is scheduled as soon as there is room"),
    value("--max-num-queued-reqs", &[], "use --max-queue-requests"),
    value("--max-num-queued-tokens", &[], "use --max-queue-tokens"),
    value("--shutdown-timeout", &[], "use --drain-timeout-seconds"),
    accepted("--enable-prefix-caching"),
    accepted("--enable-chunked-prefill"),
    refused("--no-enable-chunked-prefill", "prompts are always computed in chunks"),
    accepted("--async-scheduling"),
    accepted("--disable-hybrid-kv-cache-manager"),
    refused("--calculate-kv-scales", "every token has scales of its own"),
    // Parallelism and devices
    value("--data-parallel-size", &["1"], ONE_PROCESS),
    value("--data-parallel-rank", &[], ONE_PROCESS),
    value("--data-parallel-address", &[], ONE_PROCESS),
    value("--data-parallel-backend", &[], ONE_PROCESS),
    value("--distributed-executor-backend", &["uni", "mp"], ONE_PROCESS),
    value("--decode-context-parallel-size", &["1"], ONE_PROCESS),
    value("--worker-cls", &["auto"], ONE_PROCESS),
    value("--worker-extension-cls", &[], NO_CODE),
    value("--max-parallel-loading-workers", &[], ONE_PROCESS),
    value("--num-gpu-blocks", &[], "use --num-gpu-blocks-override"),
    value("--attention-backend", &["auto"], "there is one implementation per device"),
    accepted("--no-enable-expert-parallel"),
    accepted("--disable-custom-all-reduce"),
    accepted("--ray-workers-use-nsight"),
    // Compilation
    value("--compilation-config", &[], NO_COMPILE),
    value("-O", &[], NO_COMPILE),
    value("--cudagraph-capture-sizes", &[], NO_COMPILE),
    value("--max-cudagraph-capture-size", &[], NO_COMPILE),
    value("--additional-config", &["{}"], NO_COMPILE),
    value("--model-loader-extra-config", &["{}"], NO_COMPILE),
    // Adapters, media, speculation, structured output
    refused("--enable-lora", NO_LORA),
    value("--lora-modules", &[], NO_LORA),
    value("--max-loras", &[], NO_LORA),
    value("--max-lora-rank", &[], NO_LORA),
    value("--limit-mm-per-prompt", &["{}"], NO_MEDIA),
    value("--mm-processor-kwargs", &["{}"], NO_MEDIA),
    value("--media-io-kwargs", &["{}"], NO_MEDIA),
    value("--allowed-local-media-path", &[], NO_MEDIA),
    value("--allowed-media-domains", &[], NO_MEDIA),
    value("--structured-outputs-config", &[], "there is one backend, and it has no options"),
    value("--guided-decoding-backend", &["auto", "guidance"], "there is one backend, llguidance"),
    accepted("--exclude-tools-when-tool-choice-none"),
    value("--tool-parser-plugin", &[], NO_CODE),
    value("--reasoning-parser-plugin", &[], NO_CODE),
    value("--tool-server", &[], "clients run their tools themselves"),
    accepted("--enable-reasoning"),
    value("--kv-transfer-config", &[], "KV is not transferred"),
    value("--kv-events-config", &[], "KV events are not published"),
    value("--ec-transfer-config", &[], "embeddings are not transferred"),
    // API server
    value("--api-key", &[], FILES_ONLY),
    value("--chat-template-content-format", &["auto", "string"], "templates see strings"),
    value("--response-role", &["assistant"], "answers have the role assistant"),
    value("--uvicorn-log-level", &["info"], "use RUST_LOG"),
    value("--root-path", &[], "paths are OpenAI's own"),
    value("--middleware", &[], NO_CODE),
    value("--uds", &[], "the server listens on TCP"),
    value("--api-server-count", &["1"], ONE_PROCESS),
    value("--allowed-methods", &["[\"*\"]"], "browsers are served by what is in front"),
    value("--allowed-headers", &["[\"*\"]"], "browsers are served by what is in front"),
    value("--h11-max-incomplete-event-size", &[], "limits are fixed"),
    value("--h11-max-header-count", &[], "limits are fixed"),
    refused("--allow-credentials", "browsers are served by what is in front"),
    accepted("--enable-request-id-headers"),
    refused("--return-tokens-as-token-ids", "answers hold text only"),
    accepted("--no-enable-log-requests"),
    accepted("--disable-log-requests"),
    accepted("--no-enable-log-outputs"),
    accepted("--disable-log-stats"),
    accepted("--disable-uvicorn-access-log"),
    accepted("--disable-fastapi-docs"),
    refused("--enable-server-load-tracking", "/metrics and /stats hold the load"),
    value("--collect-detailed-traces", &[], "a trace is a span for each request"),
    value("--show-hidden-metrics-for-version", &[], "no metric is hidden"),
];

/// The command line without vLLM's flags that change nothing.
pub fn strip(arguments: Vec<String>) -> Result<Vec<String>, Failure> {
    let mut kept = Vec::with_capacity(arguments.len());
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        if argument == "--" {
            kept.push(argument);
            kept.extend(rest);
            break;
        }
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        match FLAGS.iter().find(|flag| flag.name == name) {
            None => kept.push(argument),
            Some(flag) => flag.check(inline, &mut rest)?,
        }
    }
    Ok(kept)
}

impl Flag {
    fn check(&self, inline: Option<String>, rest: &mut impl Iterator<Item = String>) -> Result<(), Failure> {
        let Flag { name, takes, why } = self;
        match takes {
            Takes::NothingAccepted => Ok(()),
            Takes::NothingRefused => Err(Failure::configuration(format!("{name} is not supported: {why}"))),
            Takes::Value(accepted) => match inline.or_else(|| rest.next()) {
                Some(value) if accepted.contains(&value.as_str()) => Ok(()),
                _ if accepted.is_empty() => Err(Failure::configuration(format!("{name} is not supported: {why}"))),
                _ => {
                    let accepted = accepted.join(" or ");
                    Err(Failure::configuration(format!("{name} is supported only as {accepted}: {why}")))
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn strip_line(line: &str) -> Result<Vec<String>, Failure> {
        strip(line.split(' ').map(str::to_owned).collect())
    }

    #[test]
    fn a_default_spelled_out_is_dropped_and_the_rest_kept() {
        let kept = strip_line("serve m --dtype auto --load-format=gguf --enable-prefix-caching --port 1").unwrap();
        assert_eq!(kept, ["serve", "m", "--port", "1"]);
    }

    #[test]
    fn anything_else_is_refused_by_name_with_the_way_out() {
        for (line, expected) in [
            ("serve m --kv-cache-memory 1000", "--kv-cache-memory-bytes"),
            ("serve m --dtype=float16", "--dtype is supported only as auto"),
            ("serve m --api-key hunter2", "--api-key-file"),
            ("serve m --enable-lora", "--enable-lora is not supported"),
            ("serve m --disable-sliding-window", "--max-model-len"),
            ("serve m --tokenizer", "--tokenizer is not supported"),
        ] {
            let failure = strip_line(line).unwrap_err();
            assert!(failure.message.contains(expected), "{line}: {failure}");
            assert!(!failure.message.contains("hunter2"), "a secret is not repeated");
        }
    }

    #[test]
    fn no_flag_of_ours_is_in_the_table() {
        let command = crate::cli::Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for argument in serve.get_arguments().filter_map(|argument| argument.get_long()) {
            assert!(FLAGS.iter().all(|flag| flag.name != format!("--{argument}")), "{argument}");
        }
    }
}
