//! Results as text: a table of scores and a plot of load and replicas over time.

use std::fmt::Write;

use crate::score::Score;
use crate::trace::Request;
use crate::world::TICK;

/// Columns of the plot.
const WIDTH: usize = 96;

/// One line per policy: attainment, GPU-hours as paid and those on spot, mean and most replicas, broken streams.
pub fn table<'a>(scores: impl Iterator<Item = (&'a str, &'a Score)>) -> String {
    let mut text = String::from("policy       attainment   GPU-hours   of spot   mean   most   broken\n");
    for (name, score) in scores {
        let ticks = score.replicas.len().max(1) as f64;
        let mean = score.replicas.iter().map(|count| f64::from(*count)).sum::<f64>() / ticks;
        let most = score.replicas.iter().max().copied().unwrap_or(0);
        let (attainment, hours, broken) = (score.attainment() * 100.0, score.gpu_hours(), score.broken);
        let spot = score.spot_seconds / 3600.0;
        let _ = writeln!(
            text,
            "{name:<12} {attainment:>8.2} % {hours:>11.2} {spot:>9.2} {mean:>6.1} {most:>6} {broken:>8}"
        );
    }
    text
}

/// Tokens a second that arrive, and replicas of one run, over time.
pub fn plot(trace: &[Request], score: &Score) -> String {
    let seconds = score.replicas.len() as f64 * TICK;
    let column = |at: f64| ((at / seconds * WIDTH as f64) as usize).min(WIDTH - 1);
    let mut tokens = vec![0.0_f64; WIDTH];
    for request in trace {
        tokens[column(request.at)] += f64::from(request.prompt + request.output) * WIDTH as f64 / seconds;
    }
    let mut replicas = vec![0.0_f64; WIDTH];
    for (index, count) in score.replicas.iter().enumerate() {
        let place = &mut replicas[column(index as f64 * TICK)];
        *place = place.max(f64::from(*count));
    }
    format!("{}{}", rows("tokens/s", &tokens, 5), rows("replicas", &replicas, 8))
}

/// A block of bars, `height` lines tall.
fn rows(title: &str, values: &[f64], height: usize) -> String {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().copied().fold(0.0, f64::max).max(1.0);
    let mut text = String::new();
    for row in (0..height).rev() {
        let bar = |value: &f64| {
            let filled = value / most * height as f64 - row as f64;
            EIGHTHS[(filled.clamp(0.0, 1.0) * 8.0).round() as usize]
        };
        let label = if row + 1 == height { format!("{most:>9.0} ") } else { " ".repeat(10) };
        let _ = writeln!(text, "{label}{}", values.iter().map(bar).collect::<String>());
    }
    let _ = writeln!(text, "{:>10}{title}", "");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plot_shows_where_load_and_replicas_were() {
        let trace = [Request { at: 475.0, prompt: 1000, output: 1 }];
        let score = Score { replicas: [[1; 48], [4; 48]].concat(), ..Score::default() };
        let plot = plot(&trace, &score);
        let lines: Vec<&str> = plot.lines().collect();
        assert_eq!(lines.len(), 15);
        assert!(lines[0].ends_with('█') || lines[0].trim_end().ends_with('█'), "{plot}");
        assert_eq!(lines[6].matches('█').count(), WIDTH / 2, "{plot}");
    }
}
