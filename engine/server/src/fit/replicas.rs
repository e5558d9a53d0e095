//! How many replicas a peak needs: by what they compute, and by what their KV holds.

/// Load at its highest.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// Requests a second.
    pub requests_per_second: f64,
    /// Tokens of a prompt.
    pub prompt_tokens: f64,
    /// Tokens of an answer.
    pub answer_tokens: f64,
    /// Share of its time that a replica may be busy.
    pub utilization: f64,
}

/// What one replica does, as measured.
#[derive(Clone, Copy, Debug)]
pub struct Replica {
    /// Prompt tokens a second.
    pub prefill_tokens_per_second: f64,
    /// Generated tokens a second with a full batch.
    pub decode_tokens_per_second: f64,
    /// Seconds between tokens at that speed.
    pub inter_token_seconds: f64,
}

/// The answer and its reasons.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replicas {
    /// Seconds of a replica that a request takes.
    seconds_per_request: f64,
    /// Replicas that compute enough.
    by_compute: f64,
    /// Tokens that are in KV at once.
    tokens_in_flight: f64,
    /// Replicas that hold them.
    by_memory: f64,
}

impl Peak {
    /// Replicas of this kind with room for `kv_tokens` each.
    pub fn replicas(&self, replica: &Replica, kv_tokens: u64) -> Replicas {
        let prefill = self.prompt_tokens / replica.prefill_tokens_per_second;
        let seconds_per_request = prefill + self.answer_tokens / replica.decode_tokens_per_second;
        // Little's law: what arrives in the time that a request stays, at its full length.
        let stay = prefill + self.answer_tokens * replica.inter_token_seconds;
        let tokens_in_flight = self.requests_per_second * stay * (self.prompt_tokens + self.answer_tokens);
        Replicas {
            seconds_per_request,
            by_compute: self.requests_per_second * seconds_per_request / self.utilization,
            tokens_in_flight,
            by_memory: tokens_in_flight / kv_tokens as f64,
        }
    }
}

impl Replicas {
    /// Whole ones.
    pub fn count(&self) -> f64 {
        self.by_compute.max(self.by_memory).ceil().max(1.0)
    }

    /// The answer with its reasons.
    pub fn explain(&self) -> String {
        let Replicas { seconds_per_request, by_compute, tokens_in_flight, by_memory } = self;
        format!(
            "replicas       {:>12.0}\n\
             to compute     {by_compute:>12.2}  a request takes {:.1} ms of a replica\n\
             to hold KV     {by_memory:>12.2}  {tokens_in_flight:.0} tokens are in flight",
            self.count(),
            seconds_per_request * 1000.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAK: Peak =
        Peak { requests_per_second: 10.0, prompt_tokens: 1000.0, answer_tokens: 100.0, utilization: 0.5 };
    const REPLICA: Replica =
        Replica { prefill_tokens_per_second: 10_000.0, decode_tokens_per_second: 1000.0, inter_token_seconds: 0.019 };

    #[test]
    fn the_scarcer_of_compute_and_memory_decides() {
        // 0.1 s to prefill and 0.1 s to decode, ten a second, half busy: four.
        let plenty = PEAK.replicas(&REPLICA, u64::MAX);
        assert!((plenty.by_compute - 4.0).abs() < 1e-9 && plenty.count() == 4.0, "{plenty:?}");
        // 2 s in flight, ten a second, 1100 tokens each.
        let scarce = PEAK.replicas(&REPLICA, 2200);
        assert!((scarce.by_memory - 10.0).abs() < 1e-9 && scarce.count() == 10.0, "{scarce:?}");
        assert!(PEAK.replicas(&REPLICA, 0).count().is_infinite());
    }
}
