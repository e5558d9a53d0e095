//! Latency against load as an SVG that needs nothing else to be looked at.

use super::measure::Percentiles;
use super::report::Run;
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
/// Room for labels around the plot.
const MARGIN: f64 = 60.0;
const COLOURS: [&str; 3] = ["#1b9e77", "#d95f02", "#7570b3"];

/// One of the percentiles.
type Pick = fn(Percentiles) -> f64;

/// Two plots, of TTFT and of TPOT, each with its percentiles over the answers a second.
pub fn svg(runs: &[Run]) -> String {
    let mut points: Vec<&Run> = runs.iter().collect();
    points.sort_by(|left, right| left.requests_per_second.total_cmp(&right.requests_per_second));
    let height = 2.0 * HEIGHT;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\"><rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    );
    plot(&mut out, 0.0, "time to first token, ms", &points, |run| run.ttft_ms);
    plot(&mut out, HEIGHT, "time per output token, ms", &points, |run| run.tpot_ms);
    out + "</svg>\n"
}

fn plot(out: &mut String, top: f64, title: &str, runs: &[&Run], of: fn(&Run) -> Percentiles) {
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max).max(1e-9) * 1.05;
    let (widest, highest) =
        (most(&mut runs.iter().map(|run| run.requests_per_second)), most(&mut runs.iter().map(|run| of(run).p99)));
    let x = |rate: f64| MARGIN + rate / widest * (WIDTH - 2.0 * MARGIN);
    let y = |ms: f64| top + HEIGHT - MARGIN - ms / highest * (HEIGHT - 2.0 * MARGIN);
    let (left, right, low, high) = (x(0.0), x(widest), y(0.0), y(highest));
    // Writing to memory does not fail.
    let mut put = |element: String| {
        let _ = write!(out, "{element}");
    };
    put(format!("<text x=\"{left}\" y=\"{}\" font-weight=\"bold\">{title}</text>", high - 12.0));
    put(format!("<path d=\"M{left} {high}V{low}H{right}\" fill=\"none\" stroke=\"black\"/>"));
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (ms, rate) = (part * highest, part * widest);
        put(format!("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{ms:.0}</text>", left - 6.0, y(ms) + 4.0));
        put(format!("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{rate:.1}</text>", x(rate), low + 16.0));
    }
    put(format!("<text x=\"{right}\" y=\"{}\" text-anchor=\"end\">answers a second</text>", low + 32.0));
    let lines: [(&str, Pick); 3] = [("p50", |p| p.p50), ("p95", |p| p.p95), ("p99", |p| p.p99)];
    for ((name, value), (colour, row)) in lines.into_iter().zip(COLOURS.into_iter().zip(0..)) {
        let at = |run: &&Run| (x(run.requests_per_second), y(value(of(run))));
        let line: Vec<String> = runs.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        put(format!("<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", line.join(" ")));
        runs.iter()
            .map(at)
            .for_each(|(x, y)| put(format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>")));
        put(format!(
            "<text x=\"{}\" y=\"{}\" fill=\"{colour}\">{name}</text>",
            right + 8.0,
            high + 16.0 * f64::from(row)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::Arrivals;
    use super::super::measure::{Measured, Sample, Targets};
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_run_is_a_point_of_every_line() {
        let run = |ms: u64| {
            let first = Duration::from_millis(ms);
            let sample = Sample { first, last: 2 * first, events: 2, prompt_tokens: 1, tokens: 2 };
            let measured = Measured { samples: vec![sample], failures: Vec::new(), elapsed: Duration::from_secs(ms) };
            Run::new(Arrivals::Closed, measured, Targets { ttft_ms: 1e9, tpot_ms: 1e9 })
        };
        let svg = svg(&[run(10), run(20), run(30)]);
        assert_eq!(svg.matches("<circle").count(), 3 * 3 * 2);
        assert_eq!(svg.matches("<polyline").count(), 3 * 2);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(!super::svg(&[]).contains("NaN"));
    }
}
