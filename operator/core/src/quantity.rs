//! Kubernetes quantities as numbers: to compare `1000m` with `1`, and to count MiB.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Suffixes as a base and its power.
const SUFFIXES: [(&str, f64, i32); 13] = [
    ("Ki", 1024.0, 1),
    ("Mi", 1024.0, 2),
    ("Gi", 1024.0, 3),
    ("Ti", 1024.0, 4),
    ("Pi", 1024.0, 5),
    ("Ei", 1024.0, 6),
    ("m", 1000.0, -1),
    ("k", 1000.0, 1),
    ("M", 1000.0, 2),
    ("G", 1000.0, 3),
    ("T", 1000.0, 4),
    ("P", 1000.0, 5),
    ("E", 1000.0, 6),
];

/// The quantity in thousandths, or `None` for a text that is none.
pub fn milli(text: &str) -> Option<f64> {
    let suffixed = |(suffix, base, power): &(&str, f64, i32)| Some((text.strip_suffix(suffix)?, base.powi(*power)));
    let (number, factor) = SUFFIXES.iter().find_map(suffixed).unwrap_or((text, 1.0));
    let is_plain = number.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    let value: f64 = is_plain.then(|| number.parse().ok()).flatten()?;
    // Rounded, so that 0.3 and 300m meet.
    value.is_finite().then(|| (value * factor * 1000.0).round())
}

/// Whole mebibytes, rounded up; `None` for less than one byte.
pub fn mebibytes(quantity: &Quantity) -> Option<u64> {
    bytes(quantity).map(|bytes| bytes.div_ceil(1_048_576))
}

/// Whole bytes, rounded up; `None` for none of them.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    let bytes = milli(&quantity.0)? / 1000.0;
    (bytes > 0.0).then_some(bytes.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_amount_are_equal() {
        for (left, right) in [("1", "1000m"), ("0.5", "500m"), ("1Gi", "1024Mi"), ("1e3", "1k"), ("12E", "12e18")] {
            assert_eq!(milli(left), milli(right), "{left} {right}");
        }
    }

    #[test]
    fn words_are_no_quantities() {
        for word in ["", "m", "nan", "inf", "spot", "1x"] {
            assert_eq!(milli(word), None, "{word}");
        }
    }

    #[test]
    fn mebibytes_round_up() {
        assert_eq!(mebibytes(&Quantity("80Gi".into())), Some(81_920));
        assert_eq!(mebibytes(&Quantity("1".into())), Some(1));
        assert_eq!(mebibytes(&Quantity("0".into())), None);
    }
}
