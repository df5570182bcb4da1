//! The nearest valid name to one that does not exist.

/// Maximum number of edits between an unknown name and the valid one that is meant.
const MAX_EDITS: usize = 2;

/// Returns the valid name that is nearest to `name` and at most [`MAX_EDITS`] away. The case of letters does not count.
pub fn nearest<'a>(name: &str, valid: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let letters = |name: &str| name.to_lowercase().chars().collect::<Vec<_>>();
    let name = letters(name);
    let near = valid.map(|valid| (letters(valid), valid));
    let near = near.filter(|(valid, _)| valid.len().abs_diff(name.len()) <= MAX_EDITS);
    let edits = near.map(|(letters, valid)| (edits(&name, &letters), valid));
    edits.min().filter(|(edits, _)| *edits <= MAX_EDITS).map(|(_, valid)| valid)
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
