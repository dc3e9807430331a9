import sys, os, time, subprocess, signal, glob
which, n, reps = sys.argv[1:4]
sys.argv=["x",which,n]
src=open("/tmp/pf/worker.py").read().split("with torch.inference_mode():\n    out = once()")[0]
exec(src)
with torch.inference_mode():
    once(); once()
    p=subprocess.Popen(["perf","record","-e","cpu-clock","-F","4000","-g","-o","/tmp/pf/p.data","-p",str(os.getpid())],stderr=subprocess.DEVNULL)
    time.sleep(1.5)
    ts=[]
    for _ in range(int(reps)):
        t=time.process_time(); once(); ts.append(1000*(time.process_time()-t))
    p.send_signal(signal.SIGINT); p.wait()
    ts.sort(); print("ms min/med", ts[0], ts[len(ts)//2])
