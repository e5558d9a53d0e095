//! One engine as a queue and a step clock: tokens per step, and how long such a step takes.
//!
//! Continuous batching: every step gives each running sequence one token and fills the rest of its budget with prompt
//! tokens in order of arrival. A sequence is admitted when its whole length fits the KV cache. What is not modelled:
//! prefix caching, preemption, sampling.

use std::collections::VecDeque;

use crate::protocol::{Edges, EngineSize, Histogram, PodMetrics};
use crate::trace::Request;

/// How long a step takes, seconds: a part that every step costs, and one for each token or sequence in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Every step.
    pub base: f64,
    /// A prompt token.
    pub prompt_token: f64,
    /// A sequence that gets its next token.
    pub sequence: f64,
    /// A token of context that such a sequence reads.
    pub context_token: f64,
}

impl StepTime {
    /// About an 8B model on one H100, as published benchmarks have it: some 10,000 prompt tokens a second, and 50 ms
    /// between tokens with 50 chats at a time.
    pub const LARGE_GPU: StepTime = StepTime { base: 0.012, prompt_token: 1e-4, sequence: 2e-4, context_token: 5e-8 };
}

/// A request in an engine.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    /// Its place in the trace.
    pub request: usize,
    arrived: f64,
    prompt: u32,
    output: u32,
    /// Prompt tokens computed.
    computed: u32,
    /// Tokens generated.
    generated: u32,
    first_token_at: f64,
    last_token_at: f64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ended {
    /// Its place in the trace.
    pub request: usize,
    /// Arrival to first token.
    pub ttft: f64,
    /// Mean time per token after the first; 0 with a single one.
    pub inter_token: f64,
}

/// One engine.
#[derive(Clone, Debug)]
pub struct Engine {
    size: EngineSize,
    step_time: StepTime,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// End of the step under way; of an idle engine, when it became idle.
    clock: f64,
    /// Prompt tokens that the step under way computes, by running sequence.
    chunks: Vec<u32>,
    is_stepping: bool,
    busy: f64,
    kv_tokens: u64,
    said: PodMetrics,
}

impl Engine {
    /// An engine that is ready at `now`.
    pub fn new(size: EngineSize, step_time: StepTime, edges: &Edges, now: f64) -> Self {
        let said = PodMetrics {
            ttft: Histogram::over(edges.ttft.len()),
            inter_token: Histogram::over(edges.inter_token.len()),
            e2e: Histogram::over(edges.e2e.len()),
            ..PodMetrics::default()
        };
        let (waiting, running, chunks) = Default::default();
        Engine {
            size,
            step_time,
            waiting,
            running,
            clock: now,
            chunks,
            is_stepping: false,
            busy: 0.0,
            kv_tokens: 0,
            said,
        }
    }

    /// Requests in it.
    pub fn load(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Requests whose stream has begun.
    pub fn streams(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(|sequence| sequence.generated > 0)
    }

    /// Takes a request that came to the gateway at `arrived`.
    pub fn admit(&mut self, index: usize, request: &Request, arrived: f64, now: f64) {
        let Request { prompt, output, .. } = *request;
        let (request, first_token_at, last_token_at) = (index, 0.0, 0.0);
        let sequence =
            Sequence { request, arrived, prompt, output, computed: 0, generated: 0, first_token_at, last_token_at };
        self.waiting.push_back(sequence);
        if !self.is_stepping {
            self.clock = self.clock.max(now);
            self.begin();
        }
    }

    /// Runs to `now`; what ended goes to `ended`.
    pub fn run(&mut self, now: f64, edges: &Edges, ended: &mut Vec<Ended>) {
        while self.is_stepping && self.clock <= now {
            self.finish(edges, ended);
            self.begin();
        }
    }

    /// Takes out requests that got no first token within `patience`, and those that `all` asks for.
    pub fn give_up(&mut self, now: f64, patience: f64) -> usize {
        let before = self.waiting.len();
        self.waiting.retain(|sequence| now - sequence.arrived < patience);
        before - self.waiting.len()
    }

    /// What it says after `interval` seconds since it last spoke.
    pub fn read(&mut self, now: f64, interval: f64) -> PodMetrics {
        // The step under way is busy time up to now.
        let ahead = if self.is_stepping { (self.clock - now).max(0.0) } else { 0.0 };
        self.said.gpu_utilization = ((self.busy - ahead) / interval).clamp(0.0, 1.0);
        self.busy = ahead;
        self.said.running = self.running.len() as u32;
        self.said.waiting = self.waiting.len() as u32;
        self.said.oldest_queue_age_seconds = self.waiting.front().map_or(0.0, |oldest| now - oldest.arrived);
        self.said.kv_usage = self.kv_tokens as f64 / self.size.kv_cache_tokens.max(1) as f64;
        self.said.clone()
    }

    /// Plans a step of what there is, if anything.
    fn begin(&mut self) {
        self.schedule();
        self.is_stepping = !self.running.is_empty();
        if !self.is_stepping {
            return;
        }
        let StepTime { base, prompt_token, sequence, context_token } = self.step_time;
        let mut seconds = base;
        for (running, chunk) in self.running.iter().zip(&self.chunks) {
            seconds += f64::from(*chunk) * prompt_token;
            if running.computed == running.prompt {
                seconds += sequence + f64::from(running.prompt + running.generated) * context_token;
            }
        }
        self.clock += seconds;
        self.busy += seconds;
    }

    /// Admits sequences and shares out the step's tokens.
    fn schedule(&mut self) {
        let decoding = self.running.iter().filter(|sequence| sequence.computed == sequence.prompt).count() as u32;
        let mut budget = self.size.max_num_batched_tokens.saturating_sub(decoding);
        self.chunks.clear();
        for sequence in &self.running {
            let chunk = (sequence.prompt - sequence.computed).min(budget);
            budget -= chunk;
            self.chunks.push(chunk);
        }
        while budget > 0 && self.running.len() < self.size.max_num_seqs as usize {
            let Some(next) = self.waiting.front() else { break };
            let length = u64::from(next.prompt + next.output);
            if !self.running.is_empty() && self.kv_tokens + length > self.size.kv_cache_tokens {
                break;
            }
            self.kv_tokens += length;
            let chunk = next.prompt.min(budget);
            budget -= chunk;
            self.chunks.push(chunk);
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Hands out the tokens of the step that ends at the clock.
    fn finish(&mut self, edges: &Edges, ended: &mut Vec<Ended>) {
        let now = self.clock;
        let (mut index, mut chunks) = (0, std::mem::take(&mut self.chunks));
        chunks.reverse();
        while let Some(sequence) = self.running.get_mut(index) {
            let chunk = chunks.pop().unwrap_or(0);
            sequence.computed += chunk;
            self.said.prompt_tokens_total += u64::from(chunk);
            if sequence.computed < sequence.prompt {
                index += 1;
                continue;
            }
            sequence.generated += 1;
            self.said.generation_tokens_total += 1;
            if sequence.generated == 1 {
                sequence.first_token_at = now;
                self.said.ttft.observe(&edges.ttft, now - sequence.arrived);
            } else {
                self.said.inter_token.observe(&edges.inter_token, now - sequence.last_token_at);
            }
            sequence.last_token_at = now;
            if sequence.generated < sequence.output {
                index += 1;
                continue;
            }
            let done = self.running.remove(index);
            self.kv_tokens -= u64::from(done.prompt + done.output);
            self.said.requests_finished_total += 1;
            self.said.e2e.observe(&edges.e2e, now - done.arrived);
            let inter_token = (now - done.first_token_at) / f64::from(done.output.max(2) - 1);
            ended.push(Ended { request: done.request, ttft: done.first_token_at - done.arrived, inter_token });
        }
        self.chunks = chunks;
    }

    /// Takes everything out: streams that have begun, and requests that can go elsewhere.
    pub fn evict(&mut self) -> (usize, Vec<(usize, f64)>) {
        let broken = self.streams().count();
        let silent = self.running.iter().filter(|sequence| sequence.generated == 0).chain(&self.waiting);
        let elsewhere = silent.map(|sequence| (sequence.request, sequence.arrived)).collect();
        self.running.clear();
        self.waiting.clear();
        self.is_stepping = false;
        (broken, elsewhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: EngineSize = EngineSize { kv_cache_tokens: 1000, max_num_seqs: 4, max_num_batched_tokens: 128 };
    const TIME: StepTime = StepTime { base: 0.1, prompt_token: 0.001, sequence: 0.01, context_token: 0.0 };

    fn edges() -> Edges {
        Edges { ttft: vec![0.5, 1.0], inter_token: vec![0.115, 0.2], e2e: vec![1.0] }
    }

    fn run(requests: &[Request], until: f64) -> (Engine, Vec<Ended>) {
        let (mut engine, mut ended) = (Engine::new(SIZE, TIME, &edges(), 0.0), Vec::new());
        for (index, request) in requests.iter().enumerate() {
            engine.run(request.at, &edges(), &mut ended);
            engine.admit(index, request, request.at, request.at);
        }
        engine.run(until, &edges(), &mut ended);
        (engine, ended)
    }

    #[test]
    fn a_request_takes_its_prefill_and_one_step_per_token() {
        let (mut engine, ended) = run(&[Request { at: 1.0, prompt: 100, output: 5 }], 10.0);
        let [one] = ended[..] else { panic!("{ended:?}") };
        assert!((one.ttft - 0.2).abs() < 1e-9 && (one.inter_token - 0.11).abs() < 1e-9, "{one:?}");
        let said = engine.read(10.0, 10.0);
        assert_eq!((said.prompt_tokens_total, said.generation_tokens_total, said.kv_usage), (100, 5, 0.0));
        assert_eq!((said.ttft.cumulative, said.inter_token.cumulative), (vec![1, 1, 1], vec![4, 4, 4]));
        assert!((said.gpu_utilization - 0.064).abs() < 1e-9);
    }

    #[test]
    fn a_long_prompt_is_computed_in_chunks_beside_running_sequences() {
        let (_, ended) =
            run(&[Request { at: 0.0, prompt: 1, output: 9 }, Request { at: 0.05, prompt: 300, output: 1 }], 10.0);
        assert_eq!(ended.len(), 2);
        let long = ended.iter().find(|one| one.request == 1).expect("it ended");
        // After the first step of 0.101 s: 127, 127 and 46 prompt tokens, each beside one decode.
        assert!((long.ttft - (0.101 - 0.05 + 3.0 * 0.11 + 0.3)).abs() < 1e-9, "{long:?}");
    }

    #[test]
    fn what_does_not_fit_waits_and_may_give_up() {
        let request = Request { at: 0.0, prompt: 300, output: 200 };
        let (mut engine, ended) = run(&[request; 3], 1.0);
        assert!(ended.is_empty());
        let said = engine.read(1.0, 1.0);
        assert_eq!((said.running, said.waiting, said.kv_usage), (2, 1, 1.0));
        assert_eq!((engine.give_up(59.0, 60.0), engine.give_up(60.0, 60.0)), (0, 1));
        let (broken, elsewhere) = engine.evict();
        assert_eq!((broken + elsewhere.len(), engine.load()), (2, 0));
    }
}
