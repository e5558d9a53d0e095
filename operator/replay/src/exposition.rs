//! What a pod says as text, in Prometheus' exposition format, read into the numbers that policies go by.
//!
//! Series of one name that differ in labels are one: what counts is added, of ratios and ages the largest is taken. A
//! counter that has counted nothing may be missing, as those with labels are until then; a gauge may not: what was not
//! measured is not 0.

use std::collections::BTreeMap;
use std::ops::Add;

use windlass_engine_contract::metrics;

use crate::protocol::{Edges, Histogram, PodMetrics, Tick};

/// What names of lines begin with that are read.
const READ: [&str; 11] = [
    metrics::NUM_REQUESTS_RUNNING,
    metrics::NUM_REQUESTS_WAITING,
    metrics::OLDEST_QUEUED_AGE,
    metrics::KV_CACHE_USAGE,
    metrics::GPU_UTILIZATION,
    metrics::PROMPT_TOKENS,
    metrics::GENERATION_TOKENS,
    metrics::REQUEST_SUCCESS,
    metrics::TIME_TO_FIRST_TOKEN,
    metrics::INTER_TOKEN_LATENCY,
    metrics::END_TO_END_LATENCY,
];

/// Why a text was not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A line of a name that is read has another form.
    #[error("{pod} tells {line:?}, which is no sample: NAME{{LABEL=\"VALUE\"}} NUMBER is, the number from 0")]
    Sample {
        /// Whose text.
        pod: String,
        /// The line.
        line: String,
    },
    /// A gauge is missing.
    #[error("{pod} tells no {name}")]
    Missing {
        /// Whose text.
        pod: String,
        /// Of the metric.
        name: &'static str,
    },
}

impl Tick {
    /// Puts what pods say as text where policies look for it.
    ///
    /// # Errors
    /// A text that lacks a gauge, or has a line of another form.
    pub fn read_texts(&mut self, edges: &Edges) -> Result<(), Error> {
        for pod in &mut self.pods {
            if let Some(text) = pod.prometheus.take() {
                pod.metrics = Some(Exposition::parse(&pod.name, &text)?.metrics(edges)?);
            }
        }
        Ok(())
    }
}

/// Samples of one pod, by name.
struct Exposition<'a> {
    pod: &'a str,
    samples: BTreeMap<&'a str, Vec<Sample>>,
}

/// A value, and the upper edge of the bucket that it counts.
struct Sample {
    edge: Option<f64>,
    value: f64,
}

impl<'a> Exposition<'a> {
    /// Comments and names that are not [`READ`] are passed over.
    fn parse(pod: &'a str, text: &'a str) -> Result<Self, Error> {
        let mut samples: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| is_read(line)) {
            let (name, sample) =
                parse(line).ok_or_else(|| Error::Sample { pod: pod.to_owned(), line: line.to_owned() })?;
            samples.entry(name).or_default().push(sample);
        }
        Ok(Exposition { pod, samples })
    }

    fn metrics(&self, edges: &Edges) -> Result<PodMetrics, Error> {
        Ok(PodMetrics {
            running: self.gauge(metrics::NUM_REQUESTS_RUNNING, f64::add)? as u32,
            waiting: self.gauge(metrics::NUM_REQUESTS_WAITING, f64::add)? as u32,
            oldest_queue_age_seconds: self.gauge(metrics::OLDEST_QUEUED_AGE, f64::max)?,
            kv_usage: self.gauge(metrics::KV_CACHE_USAGE, f64::max)?,
            gpu_utilization: self.gauge(metrics::GPU_UTILIZATION, f64::max)?,
            prompt_tokens_total: self.counter(metrics::PROMPT_TOKENS),
            generation_tokens_total: self.counter(metrics::GENERATION_TOKENS),
            requests_finished_total: self.counter(metrics::REQUEST_SUCCESS),
            ttft: self.histogram(metrics::TIME_TO_FIRST_TOKEN, &edges.ttft),
            inter_token: self.histogram(metrics::INTER_TOKEN_LATENCY, &edges.inter_token),
            e2e: self.histogram(metrics::END_TO_END_LATENCY, &edges.e2e),
        })
    }

    fn of(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.samples.get(name).into_iter().flatten()
    }

    /// Series together, two of them as `join` says.
    fn gauge(&self, name: &'static str, join: fn(f64, f64) -> f64) -> Result<f64, Error> {
        let joined = self.of(name).map(|sample| sample.value).reduce(join);
        joined.ok_or_else(|| Error::Missing { pod: self.pod.to_owned(), name })
    }

    fn sum(&self, name: &str) -> f64 {
        self.of(name).map(|sample| sample.value).sum()
    }

    fn counter(&self, name: &str) -> u64 {
        self.sum(name) as u64
    }

    fn histogram(&self, name: &str, edges: &[f64]) -> Histogram {
        let buckets = format!("{name}_bucket");
        let within = |edge: f64| {
            let is_it = |sample: &&Sample| sample.edge.is_some_and(|le| is_same(le, edge));
            self.of(&buckets).filter(is_it).map(|sample| sample.value).sum::<f64>() as u64
        };
        let cumulative = edges.iter().copied().chain([f64::INFINITY]).map(within).collect();
        Histogram { cumulative, sum: self.sum(&format!("{name}_sum")) }
    }
}

/// Edges are the same however they are written.
fn is_same(left: f64, right: f64) -> bool {
    left == right || (right.is_finite() && (left - right).abs() <= 1e-9 * right)
}

fn is_read(line: &str) -> bool {
    READ.iter().any(|name| line.starts_with(name))
}

/// A line's name and sample.
fn parse(line: &str) -> Option<(&str, Sample)> {
    let (name, rest) = line.split_at(line.find(['{', ' ', '\t'])?);
    let (edge, rest) = match rest.strip_prefix('{') {
        Some(labels) => edge_of(labels)?,
        None => (None, rest),
    };
    // What follows the value is a time, or an exemplar.
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some((name, Sample { edge, value }))
}

/// The label `le`, of labels up to their closing brace, and what follows that.
fn edge_of(labels: &str) -> Option<(Option<f64>, &str)> {
    let (mut edge, mut rest) = (None, labels.trim_start());
    while !rest.starts_with('}') {
        let (label, quoted) = rest.split_once("=\"")?;
        let (value, after) = quoted.split_at(closing_quote(quoted)?);
        if label.trim() == "le" {
            edge = Some(value.parse().ok()?);
        }
        let after = after[1..].trim_start();
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    Some((edge, &rest[1..]))
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        closes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# HELP vllm:num_requests_running Requests in batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a \"b\", {c}\\",engine="0"} 12.0
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting{engine="1"} 2
vllm:kv_cache_usage_perc{} 4.1e-2 1700000000000
windlass:oldest_queued_request_age_seconds 0.5
windlass:gpu_utilization_ratio{gpu="0"} 0.5
windlass:gpu_utilization_ratio{gpu="1"} 1

vllm:prompt_tokens_total{model_name="m"} 52110
vllm:request_success_total{finished_reason="stop"} 40
vllm:request_success_total{finished_reason="length"} 1
vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.3"} 1
vllm:time_to_first_token_seconds_bucket{le="5e-1" , model_name="m"} 2 # {trace_id="x"} 0.4
vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf",} 3
vllm:time_to_first_token_seconds_sum{model_name="m"} 2.113
vllm:time_to_first_token_seconds_count{model_name="m"} 3
vllm:prefix_cache_hit_rate -1
python_gc_objects_collected_total none
"#;

    fn edges() -> Edges {
        // As arithmetic gives it, and as it is written.
        Edges { ttft: vec![0.1 + 0.2, 0.5], inter_token: vec![0.05], e2e: Vec::new() }
    }

    fn read(text: &str) -> Result<PodMetrics, Error> {
        Exposition::parse("pod-1", text)?.metrics(&edges())
    }

    #[test]
    fn numbers_are_found_whatever_their_labels() {
        let expected = PodMetrics {
            running: 12,
            waiting: 3,
            oldest_queue_age_seconds: 0.5,
            kv_usage: 0.041,
            gpu_utilization: 1.0,
            prompt_tokens_total: 52_110,
            generation_tokens_total: 0,
            requests_finished_total: 41,
            ttft: Histogram { cumulative: vec![1, 2, 3], sum: 2.113 },
            inter_token: Histogram::over(1),
            e2e: Histogram::over(0),
        };
        assert_eq!(read(TEXT), Ok(expected));
    }

    #[test]
    fn a_gauge_that_is_missing_is_named_and_no_other_is() {
        for name in [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "windlass:oldest_queued_request_age_seconds",
            "windlass:gpu_utilization_ratio",
        ] {
            let error = read(&TEXT.replace(name, "vllm:other")).expect_err(name).to_string();
            assert_eq!(error, format!("pod-1 tells no {name}"));
        }
        read(&TEXT.replace("vllm:prompt_tokens_total", "vllm:other")).expect("nothing was counted");
    }

    #[test]
    fn a_line_of_another_form_is_quoted() {
        for line in [
            "vllm:num_requests_running",
            "vllm:num_requests_running x",
            "vllm:num_requests_running -1",
            "vllm:num_requests_running NaN",
            "vllm:num_requests_running{a=\"b 1",
            "vllm:num_requests_running{a=b} 1",
            "vllm:num_requests_running{} ",
            "vllm:e2e_request_latency_seconds_bucket{le=\"x\"} 1",
        ] {
            let error = read(&format!("{TEXT}{line}\n")).expect_err(line).to_string();
            assert!(error.contains(&format!("{:?}", line.trim())), "{error}");
        }
    }
}
