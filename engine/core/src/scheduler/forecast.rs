//! Prediction of the time to the first token, from the sequences ahead and the measured speed of steps; and the
//! prefill budget.

use std::collections::VecDeque;

use super::Scheduler;
use super::answer_lengths::CumulativeHazard;
use super::fairness::Fairness;
use super::forecast_state::{ForecastState, Workload};
use crate::engine::InterTokenLimit;
use crate::policy::Policy;
use crate::request::{RequestDemand, Tenant};
use crate::sequence::Running;

/// Fractional part of the golden ratio: its multiples are evenly spread between 0 and 1, however many there are.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// Samples lengths of answers; together they are spread as the observed ones.
pub(super) struct LengthSampler {
    hazard: CumulativeHazard,
    quantile: f64,
}

impl LengthSampler {
    /// Tokens that an answer of `generated` tokens still has to come, at most `max_tokens`.
    fn draw(&mut self, generated: usize, max_tokens: usize) -> u64 {
        self.quantile = (self.quantile + GOLDEN).fract();
        self.hazard.remaining(generated, max_tokens, self.quantile) as u64
    }
}

impl Scheduler {
    /// Predicted seconds to the first token of a request that arrived now.
    pub(super) fn predicted_ttft_seconds(&self, demand: RequestDemand) -> Option<f64> {
        let mut lengths = self.lengths();
        let mut forecast = self.forecast(demand.priority, &mut lengths)?;
        let mut workloads = self.waiting_workloads(&mut lengths);
        workloads.push(self.workload(demand, 0, &mut lengths));
        self.in_service_order(workloads).iter().map(|workload| forecast.admit(workload).first_token).last()
    }

    /// A sampler of the lengths of answers.
    pub(super) fn lengths(&self) -> LengthSampler {
        let hazard = self.answers.hazard(self.running.iter().map(|run| run.sequence.generated()));
        LengthSampler { hazard, quantile: 0.5 }
    }

    /// The waiting requests, in order of arrival.
    pub(super) fn waiting_workloads(&self, lengths: &mut LengthSampler) -> Vec<Workload> {
        self.waiting.iter().map(|sequence| self.workload(sequence.demand(), sequence.generated(), lengths)).collect()
    }

    /// The state of a simulation with the running sequences, except for those that a request of this `priority`
    /// preempts. `None` until enough steps were measured.
    pub(super) fn forecast(&self, priority: i32, lengths: &mut LengthSampler) -> Option<ForecastState<'_>> {
        self.step_time.predict(0, 0)?;
        let runs = |run: &&Running| run.sequence.priority <= self.preemptible_above(priority);
        let prefills = |run: &&Running| run.uncomputed() > 1;
        let reserved = self.running.iter().filter(runs).filter(prefills).count();
        let mut forecast = ForecastState::new(self, reserved)?;
        for run in self.running.iter().filter(runs).filter(|run| !prefills(run)) {
            forecast.add_decode(self.remaining(run, lengths), run.table.covered_blocks() as u64);
        }
        let order = self.service_order().into_iter().filter_map(|run_id| self.find(run_id));
        for run in order.map(|index| &self.running[index]).filter(runs).filter(prefills) {
            let demand = RequestDemand { prompt_tokens: run.uncomputed() as u32, ..run.sequence.demand() };
            forecast.add_prefill(&Workload {
                demand,
                answer_tokens: self.remaining(run, lengths),
                blocks: run.table.covered_blocks() as u64,
            });
        }
        Some(forecast)
    }

    fn remaining(&self, run: &Running, lengths: &mut LengthSampler) -> u64 {
        lengths.draw(run.sequence.generated(), run.sequence.remaining_tokens())
    }

    pub(super) fn workload(&self, demand: RequestDemand, generated: usize, lengths: &mut LengthSampler) -> Workload {
        let answer_tokens = lengths.draw(generated, demand.max_tokens as usize);
        // A sequence holds half of its answer on average.
        let tokens = u64::from(demand.prompt_tokens) + answer_tokens / 2;
        Workload {
            demand,
            answer_tokens,
            blocks: self.geometry.groups.sequence_blocks(tokens, self.geometry.block_tokens),
        }
    }

    /// The order in which these leave the queue, up to the last one of `workloads`.
    fn in_service_order(&self, mut workloads: Vec<Workload>) -> Vec<Workload> {
        let Some(last) = workloads.last().map(|workload| workload.demand) else { return workloads };
        match &self.fairness {
            Some(fairness) => round_robin_order(fairness.clone(), workloads, last.tenant),
            None => {
                if matches!(self.policy, Policy::Priority { .. }) {
                    workloads.retain(|workload| workload.demand.priority <= last.priority);
                    workloads.sort_by_key(|workload| workload.demand.priority);
                }
                workloads
            }
        }
    }

    /// Whether a request that arrived now would wait for others.
    pub(super) fn would_wait(&self) -> bool {
        self.free_rows() == 0 || !self.waiting.is_empty() || self.has_prefills()
    }

    /// Prompt tokens that keep the inter-token limit.
    fn prefill_within_limit(&self, decode_rows: u32) -> Option<u32> {
        match self.inter_token_limit {
            InterTokenLimit::Unlimited => None,
            InterTokenLimit::StepMultiple(times) => {
                Some(self.step_time.prefill_for(times, decode_rows).unwrap_or(INITIAL_PREFILL_TOKENS))
            }
            // Between two tokens of a sequence there are as many steps as stages.
            InterTokenLimit::Seconds(seconds) => {
                self.step_time.prefill_within(seconds / self.stages as f64, decode_rows)
            }
        }
    }

    /// Most prompt tokens of a step with this many decode rows.
    pub(super) fn prefill_budget(&self, decode_rows: u32) -> u32 {
        let limit = self.geometry.max_step_tokens.saturating_sub(decode_rows);
        let within =
            if decode_rows > 0 || self.decodes_in_flight() { self.prefill_within_limit(decode_rows) } else { None };
        let within = within.map_or(limit, |within| within.max(self.geometry.block_tokens).min(limit));
        within.min(u32::try_from(self.prompt_chunk_limit(decode_rows)).unwrap_or(u32::MAX))
    }
}

/// Prompt tokens beside decodes until the duration of steps is known.
const INITIAL_PREFILL_TOKENS: u32 = 128;

/// The order of deficit round robin, until `tenant` has nothing left.
fn round_robin_order(mut fairness: Fairness, workloads: Vec<Workload>, tenant: Tenant) -> Vec<Workload> {
    let mut queues: Vec<(Tenant, VecDeque<Workload>)> = Vec::new();
    for workload in workloads {
        match queues.iter_mut().find(|(tenant, _)| *tenant == workload.demand.tenant) {
            Some((_, queue)) => queue.push_back(workload),
            None => queues.push((workload.demand.tenant, [workload].into())),
        }
    }
    let mut order = Vec::new();
    while let Some(next) = fairness.next(queues.iter().map(|(tenant, _)| *tenant)) {
        let Some((_, queue)) = queues.iter_mut().find(|(tenant, _)| *tenant == next) else { break };
        let Some(workload) = queue.pop_front() else { break };
        fairness.spend(next, workload.demand.prompt_tokens as usize + workload.answer_tokens as usize);
        order.push(workload);
        if queue.is_empty() && next == tenant {
            break;
        }
        queues.retain(|(_, queue)| !queue.is_empty());
    }
    order
}

#[cfg(test)]
mod tests {
    use super::super::tests::GEOMETRY;
    use super::*;
    use crate::engine::EngineConfig;
    use crate::executor::Geometry;
    use crate::plan::Ticket;
    use crate::request::{Request, RequestId};

    const THREE_ROWS: Geometry = Geometry { max_step_rows: 3, max_step_logits: 3, ..GEOMETRY };

    /// A scheduler on a device whose steps take 4 ms, 0.2 ms for each prompt token and 0.5 ms for each row, with rows
    /// for three sequences; `answers` are the limits of the running ones.
    fn scheduler(target_inter_token_seconds: Option<f64>, answers: &[u32]) -> Scheduler {
        staged(1, target_inter_token_seconds, answers)
    }

    /// The same with this many pipeline stages, each of which takes that long.
    fn staged(stages: usize, target_inter_token_seconds: Option<f64>, answers: &[u32]) -> Scheduler {
        let inter_token_limit = target_inter_token_seconds.map_or(InterTokenLimit::Unlimited, InterTokenLimit::Seconds);
        let config = EngineConfig { inter_token_limit, ..EngineConfig::PLAIN };
        let mut scheduler = Scheduler::new(THREE_ROWS, config).with_stages(stages);
        for step in 0..60 {
            let (prefill, rows) = (if step % 3 == 0 { step * 7 % 300 + 1 } else { 0 }, step * 5 % 33);
            let seconds = 0.004 + 0.0002 * f64::from(prefill) + 0.0005 * f64::from(rows);
            scheduler.step_time.observe(prefill, rows, 0, seconds);
        }
        for (id, &max_tokens) in (0..).zip(answers) {
            wait(&mut scheduler, id, max_tokens);
        }
        if let Some(step) = scheduler.schedule(0.0) {
            scheduler.submitted(Ticket(0), step.rows, &step.copy_sources, step.stats);
        }
        scheduler
    }

    fn wait(scheduler: &mut Scheduler, id: u64, max_tokens: u32) {
        scheduler.add(Request::greedy(RequestId(id), vec![1, 2, 3], max_tokens), 0.0).expect("a request that fits");
    }

    fn assert_near(milliseconds: f64, expected: f64) {
        assert!((milliseconds / expected - 1.0).abs() < 0.02, "{milliseconds} ms, not {expected}");
    }

    /// Predicted milliseconds to the first token of a request with this many prompt tokens.
    fn milliseconds(scheduler: &Scheduler, prompt_tokens: u32) -> f64 {
        let demand = RequestDemand { prompt_tokens, ..RequestDemand::MINIMAL };
        scheduler.predicted_ttft_seconds(demand).expect("steps were measured") * 1e3
    }

    #[test]
    fn a_first_token_comes_after_the_prompts_before_it_and_a_place() {
        // Two steps of sixteen tokens and one of eight; a step in flight, and one of all tokens beside one that
        // decodes.
        assert_near(milliseconds(&scheduler(None, &[]), 40), 2.0 * 7.2 + 5.6);
        assert_near(milliseconds(&scheduler(None, &[10]), 5), 4.6 + 5.5);
        // A prompt that is being computed is before it, too, and its last step has room for both.
        let mut prefilling = scheduler(None, &[]);
        prefilling.add(Request::greedy(RequestId(9), vec![1; 40], 4), 0.0).expect("a request that fits");
        let step = prefilling.schedule(0.0).expect("a step");
        prefilling.submitted(Ticket(0), step.rows, &step.copy_sources, step.stats);
        assert_near(milliseconds(&prefilling, 8), 3.0 * 7.2);
    }

    #[test]
    fn who_waits_takes_a_place_for_a_whole_answer() {
        // All places are taken, for ten, four and seven tokens yet, the first of which is in flight.
        let mut full = scheduler(None, &[10, 4, 7]);
        let fourth = 5.8 + 4.0 * 5.5;
        assert_near(milliseconds(&full, 1), fourth + 5.2);
        // One that gets the first place has it for four steps and until that is seen.
        wait(&mut full, 3, 4);
        assert_near(milliseconds(&full, 1), fourth + 5.6 + 2.0 * 5.5 + 5.2);
        wait(&mut full, 4, 4);
        wait(&mut full, 5, 4);
        assert_near(milliseconds(&full, 1), fourth + 5.6 + 2.0 * 5.5 + 5.6 + 5.5 + 5.6 + 5.2);
    }

    #[test]
    fn a_first_token_and_each_one_before_it_go_through_all_stages() {
        // Three steps one after the other, of which the last one has two more stages to go.
        assert_near(milliseconds(&staged(3, None, &[]), 40), 2.0 * 7.2 + 3.0 * 5.6);
        // Two of the three rows are in one step, and four tokens take two stages each.
        assert_near(milliseconds(&staged(2, None, &[10, 4, 7]), 1), 4.0 * 2.0 * 5.0 + 2.0 * 4.7);
    }

    #[test]
    fn the_policy_decides_who_is_before_a_new_request() {
        let order = |policy, who: &[(u32, i32)]| {
            let scheduler = Scheduler::new(THREE_ROWS, EngineConfig { policy, ..EngineConfig::PLAIN });
            let workload = |(index, (tenant, priority)): (u32, &(u32, i32))| {
                // One quantum of tokens each; the length tells who came first.
                let demand =
                    RequestDemand { tenant: Tenant(*tenant), priority: *priority, prompt_tokens: 2048, max_tokens: 1 };
                Workload { demand, answer_tokens: u64::from(index), blocks: 1 }
            };
            let turns = scheduler.in_service_order((0..).zip(who).map(workload).collect());
            turns.iter().map(|workload| workload.answer_tokens).collect::<Vec<_>>()
        };
        let who = [(1, 3), (1, 2), (2, 1), (1, 2), (2, 2)];
        assert_eq!(order(Policy::Fcfs, &who), [0, 1, 2, 3, 4]);
        assert_eq!(order(Policy::LongestPrefix, &who), [0, 1, 2, 3, 4]);
        assert_eq!(order(Policy::Priority { preemption_threshold: 0 }, &who), [2, 1, 3, 4]);
        assert_eq!(order(Policy::Fair, &who), [0, 2, 1, 4]);
    }

    #[test]
    fn who_comes_is_behind_those_that_wait_and_prompts_that_are_computed() {
        assert!(!scheduler(None, &[]).would_wait() && !scheduler(None, &[4]).would_wait());
        let mut waiting = scheduler(None, &[4]);
        wait(&mut waiting, 1, 4);
        assert!(waiting.would_wait());
        waiting.schedule(0.0).expect("a step");
        assert!(waiting.would_wait(), "its prompt is not submitted");
        assert!(scheduler(None, &[4, 4, 4]).would_wait(), "no place is free");
    }

    #[test]
    fn a_prompt_gets_what_decodes_and_their_target_leave() {
        let budget = |target, rows| scheduler(target, &[]).prefill_budget(rows);
        assert_eq!([budget(None, 0), budget(None, 2), budget(None, 17)], [16, 14, 0]);
        // 0.2 ms a token in what 6.7 ms leave beside two rows; a block at least; all of it where nobody decodes.
        assert_eq!([budget(Some(6.7e-3), 2), budget(Some(1e-3), 2), budget(Some(1e-3), 0)], [8, 4, 16]);
        assert_eq!(budget(Some(1.0), 2), 14);
    }

    #[test]
    fn what_others_may_wait_is_counted_in_steps_without_prompts() {
        let budget = |times, rows| {
            let mut scheduler = scheduler(None, &[]);
            scheduler.geometry.max_step_tokens = 1000;
            scheduler.inter_token_limit = InterTokenLimit::StepMultiple(times);
            scheduler.prefill_budget(rows)
        };
        // 5 ms beside two rows, and 0.2 ms a token.
        assert_eq!([budget(3.0, 0), budget(1e3, 2), budget(1.0, 2)], [1000, 998, 4]);
        assert!((48..=52).contains(&budget(3.0, 2)), "{}", budget(3.0, 2));
        let geometry = Geometry { max_step_tokens: 1000, ..THREE_ROWS };
        let unmeasured = Scheduler::new(
            geometry,
            EngineConfig { inter_token_limit: InterTokenLimit::StepMultiple(3.0), ..EngineConfig::PLAIN },
        );
        assert_eq!((unmeasured.prefill_budget(2), unmeasured.prefill_budget(0)), (INITIAL_PREFILL_TOKENS, 1000));
    }
}
