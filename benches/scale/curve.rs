//! Points of curves and single figures, and the file they go to.
//!
//! Not for: what the points mean (`benches/scaling`).

use serde_json::{Value, json};

/// Cost at each size.
pub struct Curve {
    pub name: String,
    pub unit: &'static str,
    /// What is counted along the other axis.
    pub of: &'static str,
    pub note: &'static str,
    points: Vec<(u64, f64, f64, f64)>,
}

impl Curve {
    pub fn new(name: impl Into<String>, unit: &'static str, of: &'static str, note: &'static str) -> Curve {
        Curve { name: name.into(), unit, of, note, points: vec![] }
    }

    /// Median, lowest and highest of `values` at `size`.
    pub fn add(&mut self, size: u64, mut values: Vec<f64>) {
        assert!(!values.is_empty(), "nothing was measured");
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[0], values[values.len() - 1]);
        self.points.push((size, values[values.len() / 2], low, high));
    }
}

#[derive(Default)]
pub struct Report {
    groups: Vec<&'static str>,
    curves: Vec<Value>,
    figures: Vec<Value>,
}

impl Report {
    pub fn group(&mut self, name: &'static str) {
        println!("\n{name}");
        self.groups.push(name);
    }

    fn here(&self) -> &'static str {
        self.groups[self.groups.len() - 1]
    }

    pub fn curve(&mut self, curve: &Curve) {
        println!("{} ({}, over {})", curve.name, curve.unit, curve.of);
        for (size, median, low, high) in &curve.points {
            println!("  {size:9} {median:14.2}   ({low:.2}-{high:.2})");
        }
        let points: Vec<_> = curve
            .points
            .iter()
            .map(|&(size, median, low, high)| json!({"x": size, "median": median, "low": low, "high": high}))
            .collect();
        self.curves.push(json!({
            "group": self.here(), "name": curve.name, "unit": curve.unit, "of": curve.of, "note": curve.note,
            "points": points,
        }));
    }

    /// One number that is no curve.
    pub fn figure(&mut self, name: &str, value: f64, unit: &str, note: &str) {
        println!("  {name}: {value:.3} {unit}");
        self.figures
            .push(json!({"group": self.here(), "name": name, "value": value, "unit": unit, "note": note}));
    }

    /// Replaces the groups that ran in the file `path`.
    pub fn write(self, path: &str, quick: bool) {
        let old: Value = std::fs::read_to_string(path)
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or_default();
        let merged = |name: &str, new: Vec<Value>| {
            let old = old[name].as_array().cloned().unwrap_or_default();
            let kept =
                old.into_iter().filter(|item| !self.groups.iter().any(|group| item["group"] == *group));
            kept.chain(new).collect::<Vec<_>>()
        };
        let (curves, figures) =
            (merged("curves", self.curves.clone()), merged("figures", self.figures.clone()));
        let all = json!({
            "command": "cargo bench -p llm-datadist-core --bench scale",
            "quick": quick,
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "curves": curves,
            "figures": figures,
        });
        std::fs::write(path, serde_json::to_string_pretty(&all).unwrap() + "\n").unwrap();
    }
}
