//! `replay`: reads a trace or a judge's lines, prints what came of it. No cluster is asked.

use crate::config::ReplayArgs;
use anyhow::Context as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use windlass_operator_replay::market::Market;
use windlass_operator_replay::policy::Name;
use windlass_operator_replay::protocol::SpotSupply;
use windlass_operator_replay::trace::{self, Request, Variant};
use windlass_operator_replay::world::{Scenario, replay};
use windlass_operator_replay::{report, stdio};

/// Replays as `args` say.
///
/// # Errors
/// The trace or the judge cannot be read or understood.
pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let policy = args.policies.first().copied().unwrap_or(Name::Builtin);
    if args.stdio {
        return Ok(stdio::serve(policy, std::io::stdin().lock(), std::io::stdout().lock())?);
    }
    let trace = Variant::Scaled(args.scale).of(&read(args)?);
    anyhow::ensure!(args.min_replicas <= args.max_replicas, "--min-replicas: at most --max-replicas");
    let scenario = scenario(args);
    let mut scores = Vec::new();
    for name in &args.policies {
        let mut policy = name.policy(&scenario.hello())?;
        scores.push((name.to_string(), replay(&scenario, &trace, policy.as_mut())));
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{}", report::table(scores.iter().map(|(name, score)| (name.as_str(), score))))?;
    if let Some((name, score)) = scores.first() {
        write!(out, "\n{name}\n{}", report::plot(&trace, score))?;
    }
    Ok(())
}

fn read(args: &ReplayArgs) -> anyhow::Result<Vec<Request>> {
    let path = args.trace.as_deref().context("a trace")?;
    let source: Box<dyn BufRead> = if path.as_os_str() == "-" {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?))
    };
    trace::read(source).with_context(|| format!("in {}", path.display()))
}

fn scenario(args: &ReplayArgs) -> Scenario {
    let mut scenario = Scenario::new("replay", args.cold_start_seconds.into());
    let spec = &mut scenario.spec;
    (spec.min_replicas, spec.max_replicas) = (args.min_replicas, args.max_replicas);
    spec.initial_replicas = args.initial_replicas.clamp(args.min_replicas, args.max_replicas);
    spec.targets.ttft_seconds = f64::from(args.time_to_first_token_milliseconds) / 1000.0;
    spec.targets.inter_token_seconds = f64::from(args.inter_token_milliseconds) / 1000.0;
    scenario.market = args.on_demand_base.map(|base| market(args, base, &mut scenario.spec.spot));
    scenario
}

/// Spot nodes, and how they are used.
fn market(args: &ReplayArgs, base: i32, policy: &mut SpotSupply) -> Market {
    policy.on_demand_base = Some(base);
    policy.fallback_after_seconds = Some(args.fallback_after_seconds.into());
    let mut interruptions = args.spot_interruptions.clone();
    interruptions.sort_by(|left, right| left.at.total_cmp(&right.at));
    Market { absences: args.spot_absences.clone(), interruptions, notice: args.spot_notice_seconds.into() }
}
