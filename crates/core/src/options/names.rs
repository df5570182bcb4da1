//! The nearest valid name to one that does not exist.

/// Maximum number of edits between an unknown name and the valid one that is meant.
const MAX_EDITS: usize = 2;

/// Returns the valid name that is nearest to `name` and at most [`MAX_EDITS`] away. The case of letters does not count.
pub(super) fn nearest(name: &str, valid: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let near = valid.filter(|valid| valid.len().abs_diff(name.len()) <= MAX_EDITS);
    let name = name.to_ascii_lowercase();
    let edits = near.map(|valid| (edits(name.as_bytes(), valid.to_ascii_lowercase().as_bytes()), valid));
    edits.min().filter(|(edits, _)| *edits <= MAX_EDITS).map(|(_, valid)| valid)
}

/// Returns the least number of bytes to insert, delete or replace.
fn edits(left: &[u8], right: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, byte) in left.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}
