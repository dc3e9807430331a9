;; The product of fp32 vectors with an int8 matrix that has one fp32 scale for every 32 columns of a row.
;;
;; Addresses are in bytes of the imported memory.  `columns` is a multiple of 32, and rows of `x`, of the codes and of
;; the scales follow each other without gaps.
;;   x       fp32 [n, columns]          codes   int8 [rows, columns]       scales  fp32 [rows, columns / 32]
;;   line    fp32 [columns], scratch    out     fp32 [n, rows]
;; The JavaScript that calls it (live_matmul.js) reserves the memory; nothing is written outside `line` and `out`.
;; live_linear_bytes.js holds the assembled bytes, and a test compares them with this file.
(module
  (import "page" "memory" (memory 1))

  ;; The sum of the four numbers of a vector.
  (func $sum (param $v v128) (result f32)
    (f32.add
      (f32.add (f32x4.extract_lane 0 (local.get $v)) (f32x4.extract_lane 1 (local.get $v)))
      (f32.add (f32x4.extract_lane 2 (local.get $v)) (f32x4.extract_lane 3 (local.get $v)))))

  ;; One row of the matrix as fp32 numbers: code times scale, eight at a time, four times a group.
  (func $expand (param $codes i32) (param $scales i32) (param $columns i32) (param $line i32)
    (local $end i32) (local $eight v128) (local $scale v128)
    (local.set $end (i32.add (local.get $codes) (local.get $columns)))
    (loop $next
      (local.set $scale (v128.load32_splat (local.get $scales)))
      (local.set $eight (v128.load8x8_s (local.get $codes)))
      (v128.store (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_low_i16x8_s (local.get $eight)))))
      (v128.store offset=16 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_high_i16x8_s (local.get $eight)))))
      (local.set $eight (v128.load8x8_s offset=8 (local.get $codes)))
      (v128.store offset=32 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_low_i16x8_s (local.get $eight)))))
      (v128.store offset=48 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_high_i16x8_s (local.get $eight)))))
      (local.set $eight (v128.load8x8_s offset=16 (local.get $codes)))
      (v128.store offset=64 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_low_i16x8_s (local.get $eight)))))
      (v128.store offset=80 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_high_i16x8_s (local.get $eight)))))
      (local.set $eight (v128.load8x8_s offset=24 (local.get $codes)))
      (v128.store offset=96 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_low_i16x8_s (local.get $eight)))))
      (v128.store offset=112 (local.get $line)
        (f32x4.mul (local.get $scale) (f32x4.convert_i32x4_s (i32x4.extend_high_i16x8_s (local.get $eight)))))
      (local.set $codes (i32.add (local.get $codes) (i32.const 32)))
      (local.set $scales (i32.add (local.get $scales) (i32.const 4)))
      (local.set $line (i32.add (local.get $line) (i32.const 128)))
      (br_if $next (i32.lt_u (local.get $codes) (local.get $end)))))

  ;; One row against every vector: four vectors at a time share the loads of the row, then those that remain.
  (func $row (param $x i32) (param $n i32) (param $columns i32) (param $line i32) (param $out i32) (param $rows i32)
    (local $bytes i32) (local $step i32) (local $end i32) (local $w i32) (local $v i32)
    (local $a v128) (local $b v128) (local $c v128) (local $d v128) (local $four v128)
    (local $x1 i32) (local $x2 i32) (local $x3 i32)
    (local.set $bytes (i32.shl (local.get $columns) (i32.const 2)))
    (local.set $step (i32.shl (local.get $rows) (i32.const 2)))
    (local.set $end (i32.add (local.get $line) (local.get $bytes)))
    (block $few
      (loop $fours
        (br_if $few (i32.lt_u (local.get $n) (i32.const 4)))
        (local.set $a (v128.const i32x4 0 0 0 0))
        (local.set $b (v128.const i32x4 0 0 0 0))
        (local.set $c (v128.const i32x4 0 0 0 0))
        (local.set $d (v128.const i32x4 0 0 0 0))
        (local.set $w (local.get $line))
        (local.set $v (local.get $x))
        (local.set $x1 (i32.add (local.get $v) (local.get $bytes)))
        (local.set $x2 (i32.add (local.get $x1) (local.get $bytes)))
        (local.set $x3 (i32.add (local.get $x2) (local.get $bytes)))
        (loop $inner
          (local.set $four (v128.load (local.get $w)))
          (local.set $a (f32x4.add (local.get $a) (f32x4.mul (local.get $four) (v128.load (local.get $v)))))
          (local.set $b (f32x4.add (local.get $b) (f32x4.mul (local.get $four) (v128.load (local.get $x1)))))
          (local.set $c (f32x4.add (local.get $c) (f32x4.mul (local.get $four) (v128.load (local.get $x2)))))
          (local.set $d (f32x4.add (local.get $d) (f32x4.mul (local.get $four) (v128.load (local.get $x3)))))
          (local.set $four (v128.load offset=16 (local.get $w)))
          (local.set $a (f32x4.add (local.get $a) (f32x4.mul (local.get $four) (v128.load offset=16 (local.get $v)))))
          (local.set $b (f32x4.add (local.get $b) (f32x4.mul (local.get $four) (v128.load offset=16 (local.get $x1)))))
          (local.set $c (f32x4.add (local.get $c) (f32x4.mul (local.get $four) (v128.load offset=16 (local.get $x2)))))
          (local.set $d (f32x4.add (local.get $d) (f32x4.mul (local.get $four) (v128.load offset=16 (local.get $x3)))))
          (local.set $w (i32.add (local.get $w) (i32.const 32)))
          (local.set $v (i32.add (local.get $v) (i32.const 32)))
          (local.set $x1 (i32.add (local.get $x1) (i32.const 32)))
          (local.set $x2 (i32.add (local.get $x2) (i32.const 32)))
          (local.set $x3 (i32.add (local.get $x3) (i32.const 32)))
          (br_if $inner (i32.lt_u (local.get $w) (local.get $end))))
        (f32.store (local.get $out) (call $sum (local.get $a)))
        (local.set $out (i32.add (local.get $out) (local.get $step)))
        (f32.store (local.get $out) (call $sum (local.get $b)))
        (local.set $out (i32.add (local.get $out) (local.get $step)))
        (f32.store (local.get $out) (call $sum (local.get $c)))
        (local.set $out (i32.add (local.get $out) (local.get $step)))
        (f32.store (local.get $out) (call $sum (local.get $d)))
        (local.set $out (i32.add (local.get $out) (local.get $step)))
        (local.set $x (local.get $x3)) ;; the inner loop moved it past the fourth vector
        (local.set $n (i32.sub (local.get $n) (i32.const 4)))
        (br $fours)))
    (block $done
      (loop $ones
        (br_if $done (i32.eqz (local.get $n)))
        (local.set $a (v128.const i32x4 0 0 0 0))
        (local.set $b (v128.const i32x4 0 0 0 0))
        (local.set $w (local.get $line))
        (loop $inner
          (local.set $a (f32x4.add (local.get $a) (f32x4.mul (v128.load (local.get $w)) (v128.load (local.get $x)))))
          (local.set $b
            (f32x4.add (local.get $b) (f32x4.mul (v128.load offset=16 (local.get $w)) (v128.load offset=16 (local.get $x)))))
          (local.set $w (i32.add (local.get $w) (i32.const 32)))
          (local.set $x (i32.add (local.get $x) (i32.const 32)))
          (br_if $inner (i32.lt_u (local.get $w) (local.get $end))))
        (f32.store (local.get $out) (call $sum (f32x4.add (local.get $a) (local.get $b))))
        (local.set $out (i32.add (local.get $out) (local.get $step)))
        (local.set $n (i32.sub (local.get $n) (i32.const 1)))
        (br $ones))))

  (func (export "linear")
    (param $x i32) (param $n i32) (param $columns i32) (param $codes i32) (param $scales i32) (param $rows i32)
    (param $line i32) (param $out i32)
    (local $left i32)
    (local.set $left (local.get $rows))
    (block $done
      (loop $next
        (br_if $done (i32.eqz (local.get $left)))
        (call $expand (local.get $codes) (local.get $scales) (local.get $columns) (local.get $line))
        (call $row (local.get $x) (local.get $n) (local.get $columns) (local.get $line) (local.get $out) (local.get $rows))
        (local.set $codes (i32.add (local.get $codes) (local.get $columns)))
        (local.set $scales (i32.add (local.get $scales) (i32.shr_u (local.get $columns) (i32.const 3))))
        (local.set $out (i32.add (local.get $out) (i32.const 4)))
        (local.set $left (i32.sub (local.get $left) (i32.const 1)))
        (br $next)))))
