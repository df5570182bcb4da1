//! The nearest valid name to one that does not exist.

/// Maximum number of edits between an unknown name and the valid one that is meant.
const MAX_EDITS: usize = 2;

/// Returns the valid name that is nearest to `name` and at most two edits away. The case of letters counts only between names that
/// are equally near without it.
pub fn nearest<'a>(name: &str, valid: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = valid.filter(|valid| valid.len().abs_diff(name.len()) <= MAX_EDITS);
    let [exact, lower] = [letters(name), letters(&name.to_lowercase())];
    let edits = near
        .map(|valid| (edits(&lower, &letters(&valid.to_lowercase())), edits(&exact, &letters(valid)), valid));
    edits.min().filter(|(edits, ..)| *edits <= MAX_EDITS).map(|(.., valid)| valid)
}

fn letters(name: &str) -> Vec<char> {
    name.chars().collect()
}

/// Returns the least number of characters to insert, delete or replace.
fn edits(left: &[char], right: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, letter) in left.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}
