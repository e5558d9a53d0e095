//! A model divided into pipeline stages computes what it computes whole, over real sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::common::driver::{Job, generate};
use crate::common::tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::executor::{Executor, ExecutorError};
use windlass_engine_core::plan::{BlockId, BlockMove, InputToken, PlanRow, RowOutput, SampleRow, StepPlan, Ticket};
use windlass_engine_core::request::{RequestId, Sampling};
use windlass_engine_model::{
    ActivationType, CpuExecutor, Gathering, KvBudget, LoadError, LoadOptions, Loaded, load, load_leader, work,
};
use windlass_kernels::WeightType;

/// Longer than anything here takes, shorter than the timeout of a test.
pub const PATIENCE: Duration = Duration::from_secs(20);

fn options(tensor_parallel: u32) -> LoadOptions {
    LoadOptions { threads: 1, tensor_parallel, kv: KvBudget::Blocks(32), max_step_tokens: 64, ..LoadOptions::default() }
}

/// Five layers, so that stages have different numbers of them.
fn tiny() -> Tiny {
    Tiny { layers: 5, ..Tiny::of(WeightType::Q4_1) }
}

fn checkpoint(tiny: Tiny) -> Checkpoint {
    Checkpoint::from_bytes(tiny.build().build()).unwrap()
}

pub fn gathering(stages: u32, patience: Duration) -> (Gathering, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (Gathering { listener, stages, patience }, address)
}

fn worker(
    tiny: Tiny,
    node_rank: u32,
    stages: u32,
    leader: SocketAddr,
    ranks: u32,
) -> JoinHandle<Result<(), LoadError>> {
    thread::spawn(move || work(&checkpoint(tiny), &options(ranks), node_rank, stages, &leader.to_string(), PATIENCE))
}

fn jobs() -> Vec<Job> {
    (0..3).map(|job| Job::greedy(&(0..30 + job).map(|token| token * 7 % 320).collect::<Vec<u32>>())).collect()
}

fn text(executor: &mut dyn Executor) -> Vec<Vec<u32>> {
    generate(executor, &jobs(), 40, 16, 2)
}

#[test]
fn stages_give_the_tokens_of_one_process() {
    for tied in [true, false] {
        let tiny = Tiny { tied, ..tiny() };
        let whole = text(&mut load(&checkpoint(tiny), &options(1)).unwrap().executor);
        let (gathering, leader) = gathering(3, PATIENCE);
        let workers = [1, 2].map(|node_rank| worker(tiny, node_rank, 3, leader, 1));
        let Loaded { mut executor, .. } = load_leader(&checkpoint(tiny), &options(1), &gathering).unwrap();
        assert_eq!(text(&mut executor), whole, "tied: {tied}");
        drop(executor);
        workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
    }
}

#[test]
fn stages_may_each_have_ranks() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(tiny(), 1, 2, leader, 2);
    let mut divided = load_leader(&checkpoint(tiny()), &options(2), &gathering).unwrap();
    let one_stage = text(&mut load(&checkpoint(tiny()), &options(2)).unwrap().executor);
    assert_eq!(text(&mut divided.executor), one_stage);
    drop(divided);
    worker.join().unwrap().unwrap();
}

/// A constraint that allows every token once a number of steps was sent to the stage before: until then its own step
/// does not end.
#[derive(Debug)]
struct OnceSent {
    steps: usize,
    sent: Mutex<Receiver<()>>,
    was: OnceLock<()>,
}

impl Constraint for OnceSent {
    fn allowed(&self, _generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        self.was.get_or_init(|| {
            let sent = self.sent.lock().unwrap();
            (0..self.steps).for_each(|_| sent.recv_timeout(PATIENCE).unwrap());
        });
        Ok(TokenSet::from_words(vec![u32::MAX; 10]))
    }
}

/// Forwards frames in both directions until both sides end, and reports each step that goes to the worker.
fn relay(proxy: &TcpListener, leader: SocketAddr, sent: &Sender<()>) {
    const STEP: u8 = 8;
    let (mut worker, mut leader) = (proxy.accept().unwrap().0, TcpStream::connect(leader).unwrap());
    let (mut worker_in, mut leader_out) = (worker.try_clone().unwrap(), leader.try_clone().unwrap());
    let back = thread::spawn(move || while pass_frame(&mut worker_in, &mut leader_out).is_some() {});
    while let Some(kind) = pass_frame(&mut leader, &mut worker) {
        if kind == STEP {
            sent.send(()).unwrap();
        }
    }
    // It may have ended.
    let _ = worker.shutdown(std::net::Shutdown::Both);
    back.join().unwrap();
}

/// The second step is computed by the first stage while the last one still has the first step.
#[test]
fn each_stage_computes_a_step_of_its_own() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let worker = worker(tiny(), 1, 2, proxy.local_addr().unwrap(), 1);
    let (say_sent, sent) = channel();
    let relay = thread::spawn(move || relay(&proxy, leader, &say_sent));
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    assert_eq!(executor.stages(), 2);
    let sample = crate::common::driver::sample_row(&Sampling::GREEDY);
    let patient: Arc<dyn Constraint> = Arc::new(OnceSent { steps: 2, sent: Mutex::new(sent), was: OnceLock::new() });
    let first = PlanRow { sample: Some(SampleRow { constraint: Some(patient), ..sample.clone() }), ..row() };
    let second = PlanRow { request: RequestId(1), blocks: [BlockId(1)].into(), sample: Some(sample), ..row() };
    let tickets =
        [first, second].map(|row| executor.submit(StepPlan { rows: vec![row], ..StepPlan::default() }).unwrap());
    let drawn = tickets.map(|ticket| executor.collect(ticket).unwrap().rows.remove(0));
    assert!(matches!(drawn[0], RowOutput::Sampled(_)) && drawn[0] == drawn[1], "{drawn:?}");
    drop(executor);
    worker.join().unwrap().unwrap();
    relay.join().unwrap();
}

/// Without a pipeline of steps the first stage would wait for the token that the last stage samples.
#[test]
fn a_row_whose_token_is_still_drawn_fails_alone() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(tiny(), 1, 2, leader, 1);
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    let drawn = InputToken::SampledBy { ticket: Ticket(0), row: 0 };
    let draws = PlanRow { sample: Some(crate::common::driver::sample_row(&Sampling::GREEDY)), ..row() };
    let unknown = PlanRow { request: RequestId(1), tokens: vec![drawn], blocks: [BlockId(1)].into(), ..row() };
    let steps = [vec![draws], vec![unknown, row()]];
    let tickets = steps.map(|rows| executor.submit(StepPlan { rows, ..StepPlan::default() }).unwrap());
    let [first, second] = tickets.map(|ticket| executor.collect(ticket).unwrap().rows);
    assert!(matches!(first[..], [RowOutput::Sampled(_)]), "{first:?}");
    assert!(matches!(second[..], [RowOutput::Failed(_), RowOutput::Computed]), "{second:?}");
    drop(executor);
    worker.join().unwrap().unwrap();
}

/// Blocks are copied in every stage: the row that reads the copy samples the same as the row that reads the original.
#[test]
fn blocks_are_copied_in_every_stage() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(tiny(), 1, 2, leader, 1);
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    let mut step = |moves: Vec<BlockMove>, tokens: &[u32], first_position: u32, block: u32| {
        let row = PlanRow {
            request: RequestId(0),
            tokens: tokens.iter().copied().map(InputToken::Known).collect(),
            first_position,
            blocks: [BlockId(block)].into(),
            sample: Some(crate::common::driver::sample_row(&Sampling::GREEDY)),
            score: None,
        };
        let ticket = executor.submit(StepPlan { moves, rows: vec![row], ..StepPlan::default() }).unwrap();
        executor.collect(ticket).unwrap().rows.remove(0)
    };
    step(Vec::new(), &[5, 9, 200, 31], 0, 3);
    let original = step(Vec::new(), &[17], 4, 3);
    let copied = step(vec![BlockMove::Copy { from: BlockId(3), to: BlockId(8) }], &[17], 4, 8);
    let elsewhere = step(Vec::new(), &[17], 4, 9);
    assert_eq!(copied, original);
    assert!(matches!(original, RowOutput::Sampled(_)) && elsewhere != original, "{original:?} {elsewhere:?}");
    drop(executor);
    worker.join().unwrap().unwrap();
}

/// Every stage frees its K and V before the call returns, and allocates them again.
#[test]
fn stages_sleep_and_wake_together() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(tiny(), 1, 2, leader, 1);
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    let before = text(&mut executor);
    executor.hold_kv(false).unwrap();
    executor.hold_kv(true).unwrap();
    assert_eq!(text(&mut executor), before);
    drop(executor);
    worker.join().unwrap().unwrap();
}

/// A row with these draft tokens, after the first three tokens of a text.
fn drafting(text: &[u32], draft_tokens: &[u32]) -> PlanRow {
    let draft = DraftTree::chain(draft_tokens.iter().copied());
    let sample = SampleRow { draft, ..crate::common::driver::sample_row(&Sampling::GREEDY) };
    let tokens = text[..3].iter().copied().map(InputToken::Known).collect();
    PlanRow { tokens, sample: Some(sample), ..row() }
}

/// All draft tokens are accepted, some, and none; later tokens are the same as without draft tokens.
#[test]
fn draft_tokens_are_verified_through_all_stages() {
    let mut whole = load(&checkpoint(tiny()), &options(1)).unwrap().executor;
    let job = Job::greedy(&[5, 9, 200]);
    let said = generate(&mut whole, std::slice::from_ref(&job), 6, 16, 1).remove(0);
    let text = [&job.prompt[..], &said].concat();
    let (gathering, leader) = gathering(3, PATIENCE);
    let workers = [1, 2].map(|node_rank| worker(tiny(), node_rank, 3, leader, 1));
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    let wrong = (said[1] + 1) % 320;
    for (draft_tokens, accepted) in
        [(vec![said[0], said[1], said[2]], 3), (vec![said[0], wrong, said[2]], 1), (vec![wrong], 0)]
    {
        let ticket =
            executor.submit(StepPlan { rows: vec![drafting(&text, &draft_tokens)], ..StepPlan::default() }).unwrap();
        let expected = RowOutput::Verified(said[..=accepted].to_vec());
        assert_eq!(executor.collect(ticket).unwrap().rows, [expected], "{draft_tokens:?}");
    }
    assert_eq!(generate(&mut executor, &[job], 6, 16, 1), [said]);
    drop(executor);
    workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
}

/// A pipeline whose last joining stage is a fake: it joins with the messages of a real one, and disconnects before its
/// first step.
fn with_a_stage_that_hangs_up(stages: u32, then: impl FnOnce(&mut CpuExecutor)) {
    let (gathering, leader) = gathering(stages, PATIENCE);
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let sound: Vec<_> = (1..stages - 1).map(|node_rank| worker(tiny(), node_rank, stages, leader, 1)).collect();
    let lost = worker(tiny(), stages - 1, stages, proxy.local_addr().unwrap(), 1);
    let cut = thread::spawn(move || relay_until_ready(&proxy, leader));
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    cut.join().unwrap();
    then(&mut executor);
    drop(executor);
    let error = lost.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("the leader of the pipeline") && error.contains("closed"), "{error}");
    sound.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
}

/// The fake is the first of two stages, the second of three, and the third of four.
#[test]
fn a_stage_that_is_lost_ends_the_step_with_its_name() {
    for stages in [2, 3, 4] {
        with_a_stage_that_hangs_up(stages, |executor| {
            let plan = || StepPlan { rows: vec![row()], ..StepPlan::default() };
            // The next step in flight fails too, and so do later ones.
            let tickets = [(); 2].map(|()| executor.submit(plan()).unwrap());
            let errors = tickets.map(|ticket| executor.collect(ticket).unwrap_err().to_string());
            let name = format!("node {} of the pipeline, at 127.0.0.1", stages - 1);
            assert!(errors[0].contains(&name) && errors[0] == errors[1], "{errors:?}");
            let later = executor.submit(plan()).and_then(|ticket| executor.collect(ticket)).unwrap_err();
            let asked = [executor.prepare().unwrap_err(), executor.hold_kv(false).unwrap_err(), later];
            assert_eq!(asked.map(|error| error.to_string()), [(); 3].map(|()| errors[0].clone()));
        });
    }
}

#[test]
fn a_stage_that_is_lost_is_named_whatever_is_asked_of_it() {
    let asks: [fn(&mut CpuExecutor) -> ExecutorError; 2] =
        [|executor| executor.prepare().unwrap_err(), |executor| executor.hold_kv(false).unwrap_err()];
    for ask in asks {
        with_a_stage_that_hangs_up(3, |executor| {
            let error = ask(executor).to_string();
            assert!(error.contains("node 2 of the pipeline, at 127.0.0.1"), "{error}");
        });
    }
}

#[test]
fn a_pipeline_is_dropped_with_a_step_in_each_stage() {
    let (gathering, leader) = gathering(3, PATIENCE);
    let workers = [1, 2].map(|node_rank| worker(tiny(), node_rank, 3, leader, 1));
    let mut executor = load_leader(&checkpoint(tiny()), &options(1), &gathering).unwrap().executor;
    (0..3).for_each(|_| _ = executor.submit(StepPlan { rows: vec![row()], ..StepPlan::default() }).unwrap());
    drop(executor);
    workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
}

fn row() -> PlanRow {
    PlanRow {
        request: RequestId(0),
        tokens: vec![InputToken::Known(1)],
        first_position: 0,
        blocks: [BlockId(0)].into(),
        sample: None,
        score: None,
    }
}

/// Forwards the greeting, the assignment and `Ready`, then closes both connections.
fn relay_until_ready(proxy: &TcpListener, leader: SocketAddr) {
    let (mut worker, mut leader) = (proxy.accept().unwrap().0, TcpStream::connect(leader).unwrap());
    pass_frame(&mut worker, &mut leader).unwrap();
    pass_frame(&mut leader, &mut worker).unwrap();
    pass_frame(&mut worker, &mut leader).unwrap();
}

/// The kind of the forwarded frame; `None` if there is no further one.
pub fn pass_frame(from: &mut TcpStream, to: &mut TcpStream) -> Option<u8> {
    let mut header = [0; 5];
    from.read_exact(&mut header).ok()?;
    let mut payload = vec![0; u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize];
    from.read_exact(&mut payload).unwrap();
    to.write_all(&header).unwrap();
    to.write_all(&payload).unwrap();
    Some(header[0])
}

/// The stage would round differently from the leader, whose flags identify the answers.
#[test]
fn a_stage_that_rounds_otherwise_is_refused_on_both_sides() {
    for (of_stage, words) in [
        (LoadOptions { activations: ActivationType::Int16, ..options(1) }, "--activation-dtype int16, not int8"),
        (LoadOptions { batch_invariant: false, ..options(1) }, "--deterministic false, not true"),
        (LoadOptions { kv_data_type: KvDataType::Int8, ..options(1) }, "--kv-cache-dtype int8, not bf16"),
        (options(2), "--tensor-parallel-size 2, not 1"),
    ] {
        let (gathering, leader) = gathering(2, PATIENCE);
        let stage = move || work(&checkpoint(tiny()), &of_stage, 1, 2, &leader.to_string(), PATIENCE);
        let stage = thread::spawn(stage);
        let refusal = load_leader(&checkpoint(tiny()), &options(1), &gathering).map(drop).unwrap_err().to_string();
        let told = stage.join().unwrap().unwrap_err().to_string();
        assert!([&refusal, &told].iter().all(|text| text.contains(words)), "{refusal}, {told}");
    }
}

#[test]
fn a_stage_with_another_model_is_refused_on_both_sides() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = worker(Tiny { feed_forward: 256, ..tiny() }, 1, 2, leader, 1);
    let refusal = load_leader(&checkpoint(tiny()), &options(1), &gathering).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("node 1 of the pipeline") && refusal.contains("another model"), "{refusal}");
    let told = worker.join().unwrap().unwrap_err().to_string();
    assert!(told.contains("another model"), "{told}");
}

#[test]
fn a_stage_without_room_says_so_to_the_leader() {
    let (gathering, leader) = gathering(2, PATIENCE);
    let worker = thread::spawn(move || {
        let options = LoadOptions { memory_limit_bytes: Some(1000), ..options(1) };
        work(&checkpoint(tiny()), &options, 1, 2, &leader.to_string(), PATIENCE)
    });
    let refusal = load_leader(&checkpoint(tiny()), &options(1), &gathering).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("node 1") && refusal.contains("1000 are allowed"), "{refusal}");
    assert!(worker.join().unwrap().unwrap_err().to_string().contains("1000 are allowed"));
}

#[test]
fn strangers_are_ignored_and_absent_stages_named() {
    let (gathering, address) = gathering(3, Duration::from_millis(500));
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let refusal = load_leader(&checkpoint(tiny()), &options(1), &gathering).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("has 3 nodes") && refusal.contains("only these have joined: 0"), "{refusal}");
    let refusal =
        load_leader(&checkpoint(tiny()), &options(1), &Gathering { stages: 6, ..self::gathering(6, PATIENCE).0 });
    let refusal = refusal.map(drop).unwrap_err().to_string();
    assert!(refusal.contains("5 layers cannot be divided among 6"), "{refusal}");
}

#[test]
fn a_leader_that_never_comes_is_named() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = work(&checkpoint(tiny()), &options(1), 1, 2, &address.to_string(), Duration::from_millis(300));
    assert!(error.unwrap_err().to_string().contains(&format!("the leader of the pipeline at {address}")));
}
