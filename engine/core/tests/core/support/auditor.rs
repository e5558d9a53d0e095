//! The simulator behind an audit: checks every plan against the contract of [`Executor`].

use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;

use windlass_engine_core::executor::{Executor, ExecutorError, Geometry, KvGroups, MAX_IN_FLIGHT};
use windlass_engine_core::plan::{
    BlockId, BlockMove, InputToken, PlanRow, RowOutput, SequenceFailure, StepOutput, StepPlan, Ticket,
};
use windlass_engine_core::request::RequestId;
use windlass_engine_core::sim::{SimExecutor, Unpaced};

/// Panics on a plan that breaks the contract.
pub struct Auditor {
    sim: SimExecutor<Unpaced>,
    in_flight: VecDeque<(Ticket, StepPlan)>,
    last_plan: StepPlan,
    submitted: u64,
    /// Reports no windows, so that all blocks are kept.
    hoards: bool,
    /// Requests whose next collected row fails.
    poisoned: Mutex<HashSet<RequestId>>,
    /// Requests whose next collected row has lost its blocks.
    lost: Mutex<HashSet<RequestId>>,
}

impl Auditor {
    pub fn new(sim: SimExecutor<Unpaced>) -> Auditor {
        Auditor {
            sim,
            in_flight: VecDeque::new(),
            last_plan: StepPlan::default(),
            submitted: 0,
            hoards: false,
            poisoned: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    /// The same, but it reports no windows, so that all blocks are kept.
    pub fn hoarding(self) -> Auditor {
        Auditor { hoards: true, ..self }
    }

    pub fn poison(&self, request: RequestId) {
        self.poisoned.lock().unwrap().insert(request);
    }

    pub fn lose(&self, request: RequestId) {
        self.lost.lock().unwrap().insert(request);
    }

    /// Number of submitted plans.
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Number of steps in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The last submitted plan.
    pub fn last_plan(&self) -> &StepPlan {
        &self.last_plan
    }

    fn check_budgets(&self, plan: &StepPlan) {
        let Geometry { max_step_rows, max_step_tokens, .. } = self.geometry();
        assert!(self.in_flight.len() < MAX_IN_FLIGHT.max(self.stages()), "too many steps in flight");
        assert!((1..=max_step_rows as usize).contains(&plan.rows.len()), "{} rows", plan.rows.len());
        assert!(plan.token_count() <= max_step_tokens as usize, "{} tokens", plan.token_count());
        assert!(plan.logit_count() <= self.geometry().max_step_logits as usize, "{} logits", plan.logit_count());
        let requests: HashSet<_> = plan.rows.iter().map(|row| row.request).collect();
        assert_eq!(requests.len(), plan.rows.len(), "a request has two rows");
    }

    fn check_row(&self, row: &PlanRow) {
        let geometry = self.geometry();
        let end = row.first_position + row.token_count() as u32;
        assert!(!row.tokens.is_empty() && end <= geometry.max_sequence_tokens, "{row:?}");
        assert!(row.blocks.len() as u32 >= geometry.groups.count() * end.div_ceil(geometry.block_tokens), "{row:?}");
        assert!(row.blocks.len().is_multiple_of(geometry.groups.count() as usize), "{row:?}");
        assert!(row.blocks.iter().all(|block| block.0 < geometry.blocks), "{row:?}");
        let read: Vec<BlockId> = self.read(row).map(|(block, _)| block).collect();
        let distinct: HashSet<_> = read.iter().collect();
        assert_eq!(distinct.len(), read.len(), "a block twice in {row:?}");
        row.tokens.iter().for_each(|token| self.check_input(row, *token));
        if row.draft().is_some() {
            assert!(matches!(row.tokens[..], [InputToken::Known(_)]), "draft tokens behind an unknown token: {row:?}");
            assert!(row.score.is_none(), "draft tokens beside scores: {row:?}");
        }
    }

    /// The blocks that a row reads or writes, each with its group and its index there.
    fn read(&self, row: &PlanRow) -> impl Iterator<Item = (BlockId, (u32, usize))> {
        let Geometry { groups, block_tokens, .. } = self.geometry();
        (0..).zip(row.tables(&groups)).flat_map(move |(group, table)| {
            let first_read = groups.read_back(group).map_or(0, |read| (row.first_position + 1).saturating_sub(read));
            let places = (first_read / block_tokens) as usize..table.len();
            places.map(move |index| (table[index], (group, index)))
        })
    }

    /// Group and index of a block among those.
    fn place(&self, row: &PlanRow, block: BlockId) -> Option<(u32, usize)> {
        self.read(row).find(|(read, _)| *read == block).map(|(_, place)| place)
    }

    fn check_input(&self, row: &PlanRow, token: InputToken) {
        let InputToken::SampledBy { ticket, row: source } = token else { return };
        assert_eq!(self.stages(), 1, "a token that the last stage is still to draw: {row:?}");
        assert_eq!(row.tokens.len(), 1, "a sampled token inside a chunk");
        let (_, plan) = self.in_flight.iter().find(|(known, _)| *known == ticket).expect("a ticket in flight");
        let source = &plan.rows[source as usize];
        assert_eq!(source.request, row.request, "another request's token");
        assert!(source.draft().is_none(), "a token behind draft tokens that are not judged");
        assert!(source.sample.is_some(), "a token of a row that samples none");
        assert_eq!(source.first_position as usize + source.tokens.len(), row.first_position as usize);
    }

    /// A moved block is in no step in flight. A block that is swapped in is for a row that does not compute it.
    fn check_move(&self, plan: &StepPlan, moved: &BlockMove) {
        let (block, slot) = match moved {
            BlockMove::Copy { to, .. } => return self.check_copy(plan, *to),
            BlockMove::SwapOut { block, slot } | BlockMove::SwapIn { slot, block } => (block, slot),
        };
        let in_flight = self.in_flight.iter().flat_map(|(_, plan)| &plan.rows);
        assert!(in_flight.clone().all(|row| !row.blocks.contains(block)), "{moved:?} moves a block in flight");
        assert!(slot.0 < self.geometry().swap_slots, "{moved:?}");
        if matches!(moved, BlockMove::SwapIn { .. }) {
            let computed = |row: &PlanRow| (row.first_position / self.geometry().block_tokens) as usize;
            let reads = |row: &PlanRow| self.place(row, *block).is_some_and(|(_, index)| index < computed(row));
            assert!(plan.rows.iter().any(reads), "{moved:?} for nobody");
        }
    }

    /// A block that is copied into belongs to one row alone, which starts after the copied tokens. With several
    /// stages that row may be in a later step.
    fn check_copy(&self, plan: &StepPlan, to: BlockId) {
        let in_flight = self.in_flight.iter().flat_map(|(_, plan)| &plan.rows);
        let named: Vec<_> = in_flight.chain(&plan.rows).filter(|row| row.blocks.contains(&to)).collect();
        if self.stages() > 1 && named.is_empty() {
            return;
        }
        assert_eq!(named.len(), 1, "{to:?} is of {named:?}");
        let mut ends = named[0].tables(&self.geometry().groups).filter_map(|table| table.last());
        assert!(ends.any(|end| *end == to), "{to:?} for {:?}", named[0]);
        assert!(!named[0].first_position.is_multiple_of(self.geometry().block_tokens), "nothing of {to:?} is used");
    }

    /// The blocks that `row` writes belong to no other sequence, neither in this plan nor in one in flight.
    fn check_writes(&self, plan: &StepPlan, row: &PlanRow) {
        let first_written = (row.first_position / self.geometry().block_tokens) as usize;
        let in_flight = self.in_flight.iter().flat_map(|(_, plan)| &plan.rows);
        for (block, place) in self.read(row).filter(|(_, (_, index))| *index >= first_written) {
            for other in in_flight.clone().chain(&plan.rows) {
                let named = self.place(other, block);
                let own = other.request == row.request && named == Some(place);
                assert!(named.is_none() || own, "{row:?} writes into a block of {other:?}");
            }
        }
    }
}

impl Executor for Auditor {
    fn geometry(&self) -> Geometry {
        let geometry = self.sim.geometry();
        match self.hoards {
            true => Geometry { groups: KvGroups { full: geometry.groups.count(), ..KvGroups::ONE }, ..geometry },
            false => geometry,
        }
    }

    fn stages(&self) -> usize {
        self.sim.stages()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<Ticket, ExecutorError> {
        self.check_budgets(&plan);
        for row in &plan.rows {
            self.check_row(row);
            self.check_writes(&plan, row);
        }
        plan.moves.iter().for_each(|moved| self.check_move(&plan, moved));
        let ticket = self.sim.submit(plan.clone())?;
        self.last_plan = plan.clone();
        self.submitted += 1;
        self.in_flight.push_back((ticket, plan));
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutput, ExecutorError> {
        let (_, plan) = self.in_flight.pop_front().expect("a step in flight");
        let mut output = self.sim.collect(ticket)?;
        let (mut poisoned, mut lost) = (self.poisoned.lock().unwrap(), self.lost.lock().unwrap());
        for (index, (row, result)) in plan.rows.iter().zip(&mut output.rows).enumerate() {
            let failure = match (poisoned.remove(&row.request), lost.remove(&row.request)) {
                (true, _) => Some(SequenceFailure::Corrupted("poisoned".into())),
                (false, true) => Some(SequenceFailure::LostKv("the disk is full".into())),
                (false, false) => None,
            };
            if let Some(failure) = failure {
                *result = RowOutput::Failed(failure);
                output.scores.retain(|scores| scores.row as usize != index);
            }
        }
        Ok(output)
    }
}
